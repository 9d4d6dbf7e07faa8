"""Values that torch refuses are refused: an index below zero or beyond the end, a zero to divide by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from tests.convert import drivers
from tests.convert.programs import program_of
from tests.functions import Function

import intarsia
from intarsia.convert import convert
from intarsia.errors import GuardError

TABLE = torch.randn(4, 3)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "embedding": (lambda i: TF.embedding(i, TABLE), lambda i: torch.tensor([0, i])),
    "embedding_bag": (lambda i: TF.embedding_bag(i, TABLE), lambda i: torch.tensor([[0, i]])),
    "index_select": (lambda i: TABLE.index_select(0, i), lambda i: torch.tensor([0, i])),
    "gather": (lambda i: TABLE.gather(0, i), lambda i: torch.tensor([[0, i, 1]])),
    "scatter": (lambda i: TABLE.scatter(0, i, 2.0), lambda i: torch.tensor([[0, i, 1]])),
    "scatter_add": (lambda i: TABLE.scatter_add(0, i, TABLE[:1]), lambda i: torch.tensor([[0, i, 1]])),
    "index_add": (lambda i: TABLE.index_add(0, i, TABLE[:2]), lambda i: torch.tensor([0, i])),
    "index_copy": (lambda i: TABLE.index_copy(0, i, TABLE[:2]), lambda i: torch.tensor([0, i])),
    "index": (lambda i: TABLE[i], lambda i: torch.tensor([0, i if i >= 0 else i - 4])),
    "searchsorted": (
        lambda i: torch.searchsorted(torch.ones(4), TABLE, sorter=i),
        lambda i: torch.tensor([0, 1, 2, i]),
    ),
    "nll_loss": (lambda i: TF.nll_loss(TABLE.T, i), lambda i: torch.tensor([0, i, 1])),
    "cross_entropy": (lambda i: TF.cross_entropy(TABLE.T, i), lambda i: torch.tensor([0, i, 1])),
    "one_hot": (lambda i: TF.one_hot(i, 4), lambda i: torch.tensor([0, i])),
    "divide": (lambda i: 7 // (i + 1), lambda i: torch.tensor([0, -1 if i in (-1, 4) else i])),
    "remainder": (lambda i: 7 % (i + 1), lambda i: torch.tensor([0, -1 if i in (-1, 4) else i])),
}
# Losses are lowered to a gather, which has words of its own.
DECOMPOSED = {"nll_loss", "cross_entropy"}


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", CALLS)
def test_what_torch_refuses_raises_as_in_torch(name: str, engine: str) -> None:
    function, given = CALLS[name]
    compiled = intarsia.compile(Function(function), (given(1),), engines=[engine], min_block_size=1)
    torch.testing.assert_close(compiled(given(2)), function(given(2)))
    for index in (-1, 4):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(given(index))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((IndexError, RuntimeError)) as ours:
                compiled(given(index))
        same = str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]
        assert same or name in DECOMPOSED
    torch.testing.assert_close(compiled(given(3)), function(given(3)))


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.filterwarnings("ignore:PyTorch runs this call")
@pytest.mark.parametrize(
    ("function", "index"),
    [
        (lambda i: TABLE.index_fill(0, i, 0.0), torch.tensor([0, -1])),
        (lambda i: TABLE.take_along_dim(i, 0), torch.tensor([[0, -1, 5]])),
    ],
    ids=["index_fill", "take_along_dim"],
)
def test_an_index_that_torch_counts_from_the_end_is_answered(
    function: Callable[..., Any], index: torch.Tensor, engine: str
) -> None:
    compiled = intarsia.compile(Function(function), (index.clamp(0, 3),), engines=[engine], min_block_size=1)
    assert torch.equal(compiled(index), function(index))


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("offsets", [[0, -1, 2], [1, 1, 2], [0, 2, 1], [0, 5, 7]], ids=str)
def test_offsets_that_do_not_rise_are_for_torch(offsets: list[int], engine: str) -> None:
    """What a guard rules out after the run must not write outside a tensor while it runs."""

    def bags(places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return TF.embedding_bag(places, TABLE, starts, mode="sum")

    places = torch.tensor([0, 1, 3, 1])
    program = drivers.build(engine, convert(program_of(bags, places, torch.tensor([0, 1, 2]))))
    with pytest.raises(GuardError):
        program(places, torch.tensor(offsets))
    rising = torch.tensor([0, 2, 2])
    torch.testing.assert_close(program(places, rising)[0], bags(places, rising))


EMPTY = torch.zeros(4, 0)
CHECKED_THOUGH_EMPTY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": lambda i: TF.embedding(i, EMPTY),
    "index_select": lambda i: EMPTY.index_select(0, i),
    "index_reduce": lambda i: EMPTY.index_reduce(0, i, EMPTY[:1], "amax"),
}


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", CHECKED_THOUGH_EMPTY)
def test_indices_are_checked_though_there_is_nothing_to_compute(name: str, engine: str) -> None:
    function = CHECKED_THOUGH_EMPTY[name]
    compiled = intarsia.compile(Function(function), (torch.tensor([1]),), engines=[engine], min_block_size=1)
    assert torch.equal(compiled(torch.tensor([3])), function(torch.tensor([3])))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(torch.tensor([7]))
    with pytest.raises((IndexError, RuntimeError)) as ours:
        compiled(torch.tensor([7]))
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]
