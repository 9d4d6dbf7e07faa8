"""What rounding does to a graph's answers is seen in a run in float64, whatever the graph consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from intarsia.rounding import Rounding

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
EPS = torch.finfo(torch.float32).eps


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.function(self, x),)


def branches(model: nn.Module, x: torch.Tensor) -> Any:
    def one(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float32) @ torch.ones(8, 3)) / 3

    return torch.cond(x.sum() > -1e9, one, lambda x: x[:, :3] * 2, (x,))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a product with a weight": lambda model, x: x @ model.weight,
    "types that the graph names": lambda model, x: x.to(torch.float32).cumsum(0, dtype=torch.float32),
    "a fill in a named type": lambda model, x: torch.full((6, 8), 0.1, dtype=torch.float32) * x,
    "bits": lambda model, x: (x.view(torch.int32) & -2).view(torch.float32) * 1.1,
    "random numbers": lambda model, x: torch.nn.functional.dropout(x, 0.5, training=True) / 3,
    "complex numbers": lambda model, x: torch.fft.rfft(x).abs(),
    "a body": branches,
}


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    program = torch.export.export(Calls(function).eval(), inputs, strict=False)
    return program.run_decompositions({}).module(check_guards=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_error_of_an_answer_is_known(name: str) -> None:
    """It is some roundings, not none (the run is in float64) and not more (it computes the same)."""
    graph = graph_of(FUNCTIONS[name], X)
    with torch.no_grad(), torch.random.fork_rng():
        (answer,) = graph(X.clone())
    error = Rounding(graph, [X], [answer]).error(0, answer)
    assert error is not None
    assert 0 < float(error.max()) < 100 * EPS * float(answer.abs().max())


def test_what_is_written_is_read_in_float64_too() -> None:
    def add(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.total.add_(x.sum(0) / 3) * 1.1  # type: ignore[no-any-return]

    graph: Any = torch.export.export(Calls(add).eval(), (X,)).module(check_guards=False)
    expected = (X.double().sum(0) / 3 * 1.1,)
    error = Rounding(graph, [X], expected).error(0, expected[0])
    assert error is not None and float(error.max()) < 1e-12
    assert not graph.total.any()  # the graph's own buffer stays


def test_values_that_are_moved_show_steps_and_coarser_arithmetic() -> None:
    graph = graph_of(lambda model, x: (x * 1.1).round(), torch.tensor([0.4545454, 3.0]))
    rounding = Rounding(graph, [torch.tensor([0.4545454, 3.0])], [torch.tensor([0.0, 3.0])])
    for further_runs, change in ((0, [0.0, 0.0]), (8, [1.0, 0.0])):
        seen = rounding.change(0, further_runs)
        assert seen is not None and seen.tolist() == change
    product = graph_of(lambda model, x: x @ model.weight, X)
    answer = (X @ product.weight.detach(),)
    exact, short = (Rounding(product, [X], answer, coarsest).change(0, 1) for coarsest in (0.0, 2.0**-7))
    assert exact is not None and short is not None
    assert float(exact.max()) < 1e-4 < 1e-2 < float(short.max())


def test_graphs_that_cannot_run_in_float64_say_nothing() -> None:
    """A kernel that takes float32 alone runs in it; what fails altogether leaves the error unknown."""
    graph = graph_of(lambda model, x: x @ model.weight, X)
    assert Rounding(graph, [torch.randn(3, 3)], (X,)).error(0, X) is None
    assert Rounding(graph, [X], (X[:2],)).change(0, 1) is None
