"""Costs: what autograd keeps is read off the graph exactly, and measuring leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from pipeline_zoo import make
from torch.autograd.graph import saved_tensors_hooks

from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.stages.cost import profile, saved_bytes, weight_bytes
from intarsia.pipeline.stages.trace import trace


def really_kept(model, args, kwargs):
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    held = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        output = model(*args, **kwargs)
    assert output is not None
    return sum(t.numel() * t.element_size() for t in held.values())


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
def test_kept_bytes_are_exact(name):
    model, args, kwargs = make(name)
    captured = trace(model, args, kwargs)
    assert sum(saved_bytes(captured)) == really_kept(model, args, kwargs)


def test_weights_are_counted_once():
    model, args, kwargs = make("gpt2")
    captured = trace(model, args, kwargs)
    assert sum(weight_bytes(captured)) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_profiling_leaves_the_model_alone():
    model, args, kwargs = make("resnet")
    captured = trace(model, args, kwargs)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    seen = []
    costs = profile(captured, list(args), repeats=1, progress=lambda i, n: seen.append((i, n)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(costs) == len(captured.line.nodes) and seen[-1] == (
        2 * len(captured.line.nodes),
        2 * len(captured.line.nodes),
    )
    whole = total(costs)
    assert whole.forward > 0 and whole.backward_input > 0 and whole.seconds >= whole.forward
    conv = [c for c, n in zip(costs, captured.line.nodes, strict=True) if "conv2d" in n.name]
    assert all(c.forward > 0 and c.backward > 0 for c in conv)


def test_the_first_layer_has_no_gradient_of_its_input():
    model, args, _ = make("mlp")
    captured = trace(model, args)
    costs = profile(captured, list(args), repeats=2)
    assert costs[0].backward_input == 0.0 and costs[0].backward_weight > 0
    assert costs[2].backward_input > 0


def test_costs_add():
    assert Cost(1, 2, 3, 4, 5) + Cost(1, 1, 1, 1, 1) == Cost(2, 3, 4, 5, 6)
