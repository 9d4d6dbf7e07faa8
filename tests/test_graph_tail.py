"""The last part of a graph, run again by itself: what rounding does there is less than what it does."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from intarsia.compare import disagreement
from intarsia.graph_tail import answer_and_tail
from intarsia.rounding import Rounding


class Deep(nn.Module):
    """Residual layers; two results, one of them early."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.layers[0](x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x), early


def graph_of(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    made = torch.export.export(model.eval(), args).module(check_guards=False)
    assert isinstance(made, fx.GraphModule)
    return made


@settings(deadline=None, max_examples=20)
@given(depth=st.integers(3, 30), seed=st.integers(0, 5))
def test_the_tail_makes_the_same_of_what_it_knows(depth: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 16)
    graph = graph_of(Deep(depth), x)
    with torch.no_grad():
        made, tail = answer_and_tail(graph, [x])
        assert tail is not None
        again = fx.Interpreter(graph).run(x, initial_env=dict(tail.known))
        for one, other, plain in zip(made, again, graph(x), strict=True):
            assert torch.equal(one, other) and torch.equal(one, plain)
    kept = [value for value in tail.known.values() if value is not None]
    assert len(kept) < len(tail.known) or depth < 5  # what is not read again is let go


@settings(deadline=None, max_examples=20)
@given(depth=st.integers(3, 30), seed=st.integers(0, 5))
def test_late_roundings_are_fewer_than_all(depth: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(64, 16)
    graph = graph_of(Deep(depth), x)
    with torch.no_grad():
        made, tail = answer_and_tail(graph, [x])
    rounding = Rounding(graph, [x], made, tail=tail)
    late, early = rounding.late(0), rounding.late(1)
    everything = rounding.spread(8)[0]
    assert late is not None and early is not None and everything is not None
    assert 0 < late.square().mean().sqrt() < everything.square().mean().sqrt()
    assert not early.any()  # it is made before, and shows nothing: a whole run is asked then


def test_who_is_within_it_costs_no_run_and_who_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    graph = graph_of(Deep(12), x)
    with torch.no_grad():
        made, tail = answer_and_tail(graph, [x])
        exact = Deep(12).double()
        exact.load_state_dict(graph.state_dict())
        truth = exact(x.double())[0].float()  # summed up otherwise
    runs: list[Any] = []
    original = Rounding.spread
    monkeypatch.setattr(Rounding, "spread", lambda self, count: runs.append(count) or original(self, count))
    rounding = Rounding(graph, [x], made, tail=tail)
    assert disagreement([truth, made[1]], made, rounding) is None
    assert not runs
    wrong = truth.clone()
    wrong[3, 5] += 1e-4
    assert " at (3, 5)" in str(disagreement([wrong, made[1]], made, rounding))
    assert runs == [1, 8]


def test_graphs_without_a_tail() -> None:
    x = torch.randn(3)
    small = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert answer_and_tail(_tupled(small), [x])[1] is None
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(20):
        value = graph.call_function(torch.ops.aten.add_.Tensor, (value, 1))
    graph.output((value,))
    (made,), tail = answer_and_tail(fx.GraphModule({}, graph), [x.clone()])
    assert tail is None and torch.equal(made, x + 20)


def _tupled(module: fx.GraphModule) -> fx.GraphModule:
    output = module.graph.output_node()
    output.args = ((output.args[0],),)
    module.recompile()
    return module


def test_numbers_that_are_no_tensors_pass_through() -> None:
    graph = fx.Graph()
    count: Any = graph.placeholder("n")
    x: Any = graph.placeholder("x")
    for _ in range(20):
        count = graph.call_function(operator.add, (count, 1))
        x = graph.call_function(torch.add, (x, 0.5))
    graph.output((count, x))
    module = fx.GraphModule({}, graph)
    made, tail = answer_and_tail(module, [3, torch.randn(4)])
    rounding = Rounding(module, [3, torch.randn(4)], made, tail=tail)
    assert made[0] == 23 and rounding.late(0) is None
