"""Symbolic shapes of segments, `Input`, and `run_on`."""

from __future__ import annotations

import pytest
import torch
from tests.partition.graphs import equal, lower, refuse, run_pieces
from torch import nn

from intarsia.capture.annotate import run_on, wanted_engine
from intarsia.capture.input import Input, honest_sizes, resolve
from intarsia.errors import InputError, PartitionError
from intarsia.graph.border import borders
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan_text import segment_shapes
from intarsia.partition import PartitionOptions, SupportTable, dependency, extract

ONE = PartitionOptions(min_block_size=1)


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.lgamma(self.linear(x))
        return y.reshape(x.shape[0] * 2, 2).sin()


def dynamic(low: int = 1, high: int = 8, usual: int = 4):
    shapes = resolve(
        (Input(min_shape=(low, 6), opt_shape=(usual, 6), max_shape=(high, 6)),),
    )
    model = Dynamic()
    with honest_sizes():
        gm = lower(model, shapes.args, dynamic_shapes=shapes.dynamic_shapes)
    return model, gm, shapes


def test_segments_know_their_symbolic_shapes_and_ranges() -> None:
    _, gm, _ = dynamic()
    plan = dependency(gm, refuse(gm, "lgamma"), ONE)
    shapes = segment_shapes(borders(gm.graph, plan.segments))
    first, second, third = shapes[:3]
    (symbol, fixed) = first.inputs[0].sizes
    assert isinstance(symbol, str) and fixed == 6
    assert first.inputs[0].ranges == {symbol: (1, 8)}
    assert third.outputs[0].sizes == (f"2*{symbol}", 2)
    assert third.outputs[0].ranges == {f"2*{symbol}": (2, 16)}
    assert (first.bytes_in, first.bytes_out, second.bytes_in) == (0, 4 * 4 * 4, 4 * 4 * 4)


def test_only_tensors_cross_and_sizes_are_recomputed() -> None:
    model, gm, shapes = dynamic()
    plan = dependency(gm, refuse(gm, "lgamma"), ONE).verify(gm)
    pieces = extract(gm, plan)
    for piece in pieces:
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in (*piece.inputs, *piece.outputs))
    assert [node.name for node in pieces[-1].inputs] == ["lgamma"]  # the size is read off it, not off x
    for which in ("min", "opt", "max"):
        (x,) = shapes.corners[which]
        assert equal(run_pieces(gm, pieces, (x,))[0], gm(x)[0])
        torch.testing.assert_close(gm(x)[0], model(x))


@pytest.mark.parametrize("low", [0, 1])
def test_sizes_0_and_1_do_not_specialise(low: int) -> None:
    model, gm, shapes = dynamic(low=low, usual=1)
    assert shapes.args[0].shape == (2, 6)
    assert shapes.corners["opt"][0].shape == (1, 6)
    x = next(node for node in gm.graph.nodes if node.op == "placeholder")
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)
    plan = dependency(gm, refuse(gm, "lgamma"), ONE)
    assert segment_shapes(borders(gm.graph, plan.segments))[0].inputs[0].ranges.popitem()[1] == (low, 8)
    example = shapes.corners["min"][0]
    assert model(example).shape == gm(example)[0].shape


def test_this_torch_keeps_sizes_honest() -> None:
    """The setting behind `honest_sizes` is not public; this notices when it goes."""
    with honest_sizes() as able:
        assert able


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs shape"),
        ({"shape": (1,), "min_shape": (1,)}, "give one of them"),
        ({"min_shape": (1,), "opt_shape": (1, 2), "max_shape": (1,)}, "differ in rank"),
        ({"min_shape": (4,), "opt_shape": (2,), "max_shape": (8,)}, "dimension 0 must rise from 0: 4, 2, 8"),
    ],
)
def test_a_wrong_input_says_why(given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Input(**given)


def test_inputs_beside_tensors() -> None:
    fixed = torch.ones(2)
    ids = Input(min_shape=(1, 4), opt_shape=(2, 4), max_shape=(3, 4), dtype=torch.int64, domain=(0, 5))
    resolved = resolve((ids, {"mask": fixed}, Input(shape=(2, 2), dtype=torch.bool)))
    assert resolved.args[0].dtype == torch.int64 and 0 <= resolved.args[0].min() <= resolved.args[0].max() < 5
    assert resolved.dynamic_shapes[1:] == ({"mask": None}, None)
    assert resolved.corners["max"][0].shape == (3, 4) and resolved.corners["max"][1]["mask"] is fixed
    assert resolve((fixed,)).dynamic_shapes is None


class Annotated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        with run_on("b"):
            x = nn.functional.softplus(x)
            with run_on("pytorch"):
                x = x.exp()
            x = x.tanh()
        return x.cos()


@pytest.mark.parametrize("strict", [False, True])
def test_run_on_survives_export_and_decomposition(strict: bool) -> None:
    gm = lower(Annotated(), (torch.rand(3),), strict=strict)
    wanted = {node.name: wanted_engine(node) for node in compute_nodes(gm.graph)}
    assert wanted.pop("sin") is None and wanted.pop("cos") is None
    assert wanted.pop("exp_1") == "pytorch"
    assert set(wanted.values()) == {"b"} and "tanh" in wanted
    plan = dependency(gm, SupportTable(("a", "b", "pytorch")), ONE).verify(gm)
    assert [segment.engine for segment in plan.segments] == ["a", "b", "pytorch", "b", "a"]
    assert "run_on('b') asks for b" in str(plan)


def test_run_on_an_unknown_engine_is_an_error() -> None:
    gm = lower(Annotated(), (torch.rand(3),))
    with pytest.raises(PartitionError, match="run_on\\('b'\\) around"):
        dependency(gm, SupportTable(("a", "pytorch")), ONE)


def test_run_on_does_nothing_in_eager_mode() -> None:
    x = torch.rand(3)
    expected = nn.functional.softplus(x.sin()).exp().tanh().cos()
    assert equal(Annotated()(x), expected)
