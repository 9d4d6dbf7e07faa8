"""Custom operators are called as often as the model calls them, unless their author says they are pure."""

from __future__ import annotations

import torch
from torch import nn

import intarsia
from intarsia.lower import pure_operators

CALLS: list[float] = []


@torch.library.custom_op("intarsia_tests::ticks", mutates_args=())
def ticks(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(1.0)
    return x + len(CALLS)


@ticks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("intarsia_tests::clock", mutates_args=())
def clock(size: int) -> torch.Tensor:
    CALLS.append(1.0)
    return torch.full((size,), float(len(CALLS)))


@clock.register_fake
def _(size: int) -> torch.Tensor:
    return torch.empty(size)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ticks(x)  # read by nobody, called all the same
        return ticks(x), ticks(x).relu(), ticks(self.weight) + clock(3)


def test_an_operator_that_is_not_pure_is_neither_merged_nor_folded_nor_dropped() -> None:
    x = torch.zeros(3)
    fast = intarsia.compile(Twice(), (x,), verify=False, engines=["onnxruntime"], min_block_size=1)
    for _ in range(2):
        CALLS.clear()
        answers = fast(x)
        assert [float(answer[0]) for answer in answers] == [2.0, 3.0, 4.0 + 5.0]


def test_an_operator_said_to_be_pure_is_merged() -> None:
    x = torch.zeros(3)
    pure_operators.add(torch.ops.intarsia_tests.ticks)
    try:
        fast = intarsia.compile(Twice(), (x,), verify=False)
    finally:
        pure_operators.discard(torch.ops.intarsia_tests.ticks)
    CALLS.clear()
    fast(x)
    assert len(CALLS) == 2, "one ticks(x), none of the weight's, and the clock"
