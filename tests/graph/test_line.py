"""Lines of graphs: purity, memory, where a graph may be cut and what crosses; plans from splits and back."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from tests.partition.graphs import equal, run_pieces
from tests.pipeline.pipeline_zoo import make
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.convert import registry
from intarsia.errors import PartitionError
from intarsia.graph.line import placement_line
from intarsia.graph.nodes import changed_values, has_no_effect, memory_of
from intarsia.graph.piece import extract, pieces_at, place_of, places_of, plan_at
from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment
from intarsia.lower.model import lower_model
from intarsia.pipeline import split
from intarsia.pipeline.stages.trace import trace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS = torch.randint(0, 64, (4, 12))


@functools.cache
def bert():
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    return transformers.BertModel(config).eval(), (TOKENS,), {"attention_mask": mask}


@functools.cache
def resnet():
    model, args, kwargs = make("resnet")
    return model.eval(), args, kwargs


MODELS = pytest.mark.parametrize("model_of", [bert, resnet])


@functools.cache
def lowered(model_of):
    model, args, kwargs = model_of()
    found, _ = lower_model(model, args, kwargs, None, has_converter=registry.__contains__, drop_guards=True)
    return found.module


@functools.cache
def traced(model_of):
    model, args, kwargs = model_of()
    return trace(model, args, kwargs)


@MODELS
def test_the_waists_of_placement_are_waists_of_the_pipeline(model_of):
    """Each waist of the lowered graph is a place where the training graph may be cut, as narrow."""
    placement, pipeline = placement_line(lowered(model_of).graph), traced(model_of).line
    found = placement.waists()
    assert len(found) >= 8
    between_blocks = [w for w in found if w.node.startswith(("linear", "conv2d"))]
    assert len(between_blocks) >= 4
    for waist in between_blocks:
        there = pipeline.waist(place_of(pipeline, waist.node))
        assert there.place in pipeline.allowed and there.bytes == waist.bytes, (waist, there)
        assert there in pipeline.waists()


@MODELS
def test_a_split_follows_a_plan_and_a_plan_follows_a_split(model_of):
    model, args, kwargs = model_of()
    gm = lowered(model_of)
    line = placement_line(gm.graph)
    waists = [w for w in line.waists() if w.node.startswith(("linear", "conv2d"))]
    plan = plan_at(line, [waists[len(waists) // 3].place, waists[2 * len(waists) // 3].place]).verify(gm)
    want = pytree.tree_leaves(model(*args, **kwargs))

    stages = split(model, args, kwargs, cuts=plan, by="memory")
    assert len(stages) == len(plan) == 3
    got = pytree.tree_leaves(stages(*args, **kwargs))
    assert all(map(torch.equal, got, want))
    assert [cut.node for cut in stages.report.cuts] == [
        segment.nodes[0].name for segment in plan.segments[1:]
    ]

    chosen = split(model, args, kwargs, stages=3, by="memory")
    captured = traced(model_of)
    pipeline_plan = plan_at(captured.line, [cut.place for cut in chosen.report.cuts])
    back = plan_at(line, places_of(line, pipeline_plan)).verify(gm)
    assert len(back) == 3
    pieces = extract(gm, back)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    flat = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    answers = run_pieces(gm, pieces, tuple(flat)[: len(inputs)])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(answers, want, strict=True))


@MODELS
def test_stages_are_the_pieces_of_a_plan(model_of):
    """The stages of a split and the pieces `extract` cuts out of its plan are the same graphs."""
    model, args, kwargs = model_of()
    stages = split(model, args, kwargs, stages=3, by="memory")
    captured = traced(model_of)
    plan = plan_at(captured.line, [cut.place for cut in stages.report.cuts]).verify(captured.graph)
    for piece, stage in zip(extract(captured.module, plan), stages, strict=True):
        ops = [n.name for n in piece.graph.nodes if n.op == "call_function" and "sym_size" not in n.name]
        mine = [n.name for n in stage.program.graph.nodes if n.op == "call_function"]
        assert ops == [name for name in mine if "sym_size" not in name]
    holders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    given = iter(captured.signature.flatten(args, kwargs))
    values = [captured.states[n].tensor if n in captured.states else next(given, None) for n in holders]
    answers = run_pieces(captured.module, extract(captured.module, plan), tuple(values))
    want = pytree.tree_leaves(model(*args, **kwargs))
    assert all(map(equal, answers, want))


def test_every_stretch_between_waists_stands_alone():
    model, args, _ = resnet()
    gm = lowered(resnet)
    line = placement_line(gm.graph)
    pieces = pieces_at(gm, line, [w.place for w in line.waists()])
    assert all(len([n for n in p.inputs if n.op != "placeholder"]) <= 1 for p in pieces)
    want = model(*args)
    assert torch.allclose(run_pieces(gm, pieces, args)[0], want, atol=1e-5)


def test_a_plan_that_no_line_follows_is_refused():
    model, args, _ = make("mlp")
    line = trace(model, args).line
    odd, even = line.nodes[::2], line.nodes[1::2]
    with pytest.raises(PartitionError, match="segments 0 and 1 of the plan"):
        places_of(line, Plan((Segment("a", odd), Segment("a", even))))


def test_places_by_module_name():
    model, args, kwargs = bert()
    stages = split(model, args, kwargs, cuts=["encoder.layer.1", "encoder.layer.2.output"], by="memory")
    names = [[n for n, _ in stage.named_parameters()] for stage in stages]
    assert any(n.startswith("encoder.layer.0.") for n in names[0])
    assert names[1][0].startswith("encoder.layer.1.") and names[2][0].startswith("encoder.layer.2.output")
    with pytest.raises(PartitionError, match=r"'encoder.layer.9'.*did you mean 'encoder.layer"):
        split(model, args, kwargs, cuts=["encoder.layer.9"], by="memory")


class Effects(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        y = self.a(x)
        flat = y.view(-1)
        y.mul_(2.0)
        noise = torch.rand_like(y)
        quiet = nn.functional.dropout(noise, 0.5, False)
        self.n += 1
        return flat.view(4, 4) + quiet * self.n


def test_purity_memory_and_mutation():
    captured = trace(Effects(), (torch.randn(4, 4),))
    by_name = {n.name: n for n in captured.graph.nodes}
    assert memory_of(by_name["view"]) == {by_name["linear"]} == memory_of(by_name["view_1"])
    assert changed_values(by_name["mul_"]) == [by_name["linear"]]
    assert not has_no_effect(by_name["rand_like"]) and not has_no_effect(by_name["mul_"])
    assert has_no_effect(by_name["dropout"]) and has_no_effect(by_name["linear"])
    assert {"linear", "view", "b_n"} <= {n.name for n in captured.line.written}
    assert "linear is changed in place by aten.mul_" in captured.line.closed[1]
