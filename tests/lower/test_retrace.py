"""Decomposing by our own, shorter way gives what `run_decompositions` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from intarsia.convert import registry
from intarsia.lower import lowering
from intarsia.lower.decompositions import (
    decomposition_table,
    register_decomposition,
    unregister_decomposition,
)
from intarsia.lower.lowering import decomposed

aten = torch.ops.aten


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _in_place(self: Of, x: torch.Tensor) -> torch.Tensor:
    y = self.norm(x * 2)
    y[:, 1:] += 1
    return y.relu_().square_().t()


def _branches(self: Of, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.einsum("ij,kj->ik", x, x), lambda x: x @ x.t(), (x,))  # type: ignore[no-any-return]


def _composite(self: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attended = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
    return torch.diff(x), torch.trapz(x), torch.cdist(x, x), attended, nn.functional.mish(x)


MODELS = {"in place": _in_place, "branches": _branches, "composite": _composite}


def _same(program: torch.export.ExportedProgram) -> None:
    table = decomposition_table(registry.__contains__)
    ours = decomposed(program, dict(table))
    with torch.no_grad():
        theirs = program.run_decompositions(dict(table))
    assert ours.graph_module.print_readable(False) == theirs.graph_module.print_readable(False)
    assert str(ours.graph_signature) == str(theirs.graph_signature)


@pytest.mark.parametrize("varying", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_the_same(name: str, varying: bool) -> None:
    shapes = ({0: torch.export.Dim("n", max=25)},) if varying else None
    _same(torch.export.export(Of(MODELS[name]).eval(), (torch.randn(5, 4),), dynamic_shapes=shapes))


@pytest.fixture
def own_operator() -> Iterator[str]:
    with torch.library._scoped_library("intarsia_retrace", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.square(x) * 2, "CompositeImplicitAutograd")
        yield "twice"


def test_operators_that_come_later(own_operator: str) -> None:
    def call(self: Of, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.intarsia_retrace.twice(x).add_(1)  # type: ignore[no-any-return]

    _same(torch.export.export(Of(call), (torch.randn(5, 4),)))


def test_rules_of_users() -> None:
    program = torch.export.export(Of(_composite), (torch.randn(5, 4),))

    @register_decomposition(aten.scaled_dot_product_attention.default)
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.softmax(q @ k.mT / 2, -1) @ v

    try:
        _same(program)
    finally:
        unregister_decomposition(aten.scaled_dot_product_attention.default)


def test_torch_still_has_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, programs are decomposed as torch says, later."""
    assert lowering._private() is not None
    monkeypatch.setattr(lowering, "_private", lambda: None)
    _same(torch.export.export(Of(_in_place).eval(), (torch.randn(5, 4),)))
