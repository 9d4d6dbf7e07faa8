"""Casts, reciprocals and the signs of zeros are PyTorch's on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.functions import Function
from torch import nn

import intarsia

BYTES = [2.0**40 + 32, 0.0, -1.0, 1.5, 127.0, -7.5, -100.0]
# Each with numbers that the first cast changes, or that the second one does not hold.
CHAINS = [
    ([3e9, -3e9, 2.0**40 + 2.0**19, 300.0, -1.5], (torch.float32, torch.int64, torch.int32)),
    ([3e9, 2.0**40 + 2.0**19, 300.0, -1.5], (torch.float32, torch.int64, torch.int16)),
    ([3e9, 2.0**40 + 32, 300.0, -1.5], (torch.float64, torch.int64, torch.uint8)),
    ([70001, 2**24 + 1, 2**31 - 1, -5], (torch.int64, torch.int32, torch.int8)),
    ([2**24 + 1, -(2**24) - 1, 7], (torch.int32, torch.float32, torch.int16)),
    ([2**53 + 1, 5], (torch.int64, torch.float64, torch.int32)),
    ([2.0**24 + 1, 70.6], (torch.float64, torch.float32, torch.int16)),
    ([12345, 77], (torch.int16, torch.float16, torch.int8)),
    ([257, 77], (torch.int32, torch.bfloat16, torch.uint8)),
    ([-1.5, -7.0, 3.0], (torch.float16, torch.int32, torch.uint8)),
    ([-40000.0, -200.5, 3.0], (torch.float32, torch.bfloat16, torch.float16)),
    ([12345, 70000, 3], (torch.int32, torch.bfloat16, torch.float32)),
    ([12345, 3], (torch.int16, torch.float32, torch.bfloat16)),
    ([12345, 3], (torch.int16, torch.float16, torch.float32)),
]


class Casts(nn.Module):
    def __init__(self, *dtypes: torch.dtype, moved: bool = False) -> None:
        super().__init__()
        self.dtypes, self.moved = dtypes, moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dtype in self.dtypes:
            x = x.to(dtype)
            x = x.reshape(-1) if self.moved else x
        return x + 1  # casts alone are left to PyTorch


@pytest.mark.parametrize("moved", [False, True], ids=["neighbours", "a reshape between"])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("values", "dtypes"), CHAINS, ids=lambda chain: "-".join(map(str, chain)))
def test_two_casts_are_two(
    values: list[float], dtypes: tuple[torch.dtype, ...], engine: str, moved: bool
) -> None:
    first, *others = dtypes
    model, x = Casts(*others, moved=moved), torch.tensor(values, dtype=first).repeat(7)
    fast = intarsia.compile(model, (torch.ones_like(x),), engines=[engine], min_block_size=1)
    assert torch.equal(fast(x), model(x))
    assert engine in fast.plan.engines or engine == "openvino"  # which refuses what it would answer otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 16, 37])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_negative_numbers_as_bytes(engine: str, count: int, dtype: torch.dtype) -> None:
    model, x = Casts(torch.uint8), torch.tensor(BYTES[dtype.itemsize < 8 :], dtype=dtype).repeat(7)[:count]
    x = x.flip(0)  # the last ones are computed apart
    fast = intarsia.compile(model, (torch.ones_like(x),), engines=[engine], min_block_size=1)
    assert torch.equal(fast(x), model(x))


def test_two_casts_in_a_body_are_two() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y.long().int() + 1, lambda y: (y * 2).long().int(), (x,))

    model, x = Chosen(), torch.tensor([3e9, 1.0, 2.0])
    fast = intarsia.compile(model, (torch.ones_like(x),), engines=["onnxruntime"], min_block_size=1)
    assert torch.equal(fast(x), model(x)) and torch.equal(fast(-x), model(-x))


# Reciprocals of denormals, and what is made of them, have the right sign.


LEAST = 2.0**-149
# As many as a vector has, several times over.
VALUES = torch.tensor([LEAST, -LEAST, 1e-40, -1e-40, 2.0**-128, 2.0**-126, 0.0, -0.0, 1e38, -3.0]).repeat(5)

MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reciprocal": torch.reciprocal,
    "of a square": lambda x: (x * 1e10) ** -2,
    "signbit": torch.signbit,
    "copysign": lambda x: torch.copysign(x + 2, x),
    "atan2": lambda x: torch.atan2(x, -x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_denormals_keep_their_sign(name: str, dtype: torch.dtype) -> None:
    model, x = Function(MADE[name]), VALUES.to(dtype)
    fast = intarsia.compile(model, (torch.ones_like(x),), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_reciprocals_are_those_of_pytorch_to_the_last_bit() -> None:
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    fast = intarsia.compile(Function(torch.reciprocal), (x,), engines=["onnxruntime"], min_block_size=1)
    assert torch.equal(fast(x), x.reciprocal())


# -0.0 keeps its sign where it is chosen, divided or left over: 1 / -0.0 tells.


ZEROS = torch.tensor([-0.0, 0.0, -0.0, 0.0, -3.0, 3.0, 1.0, -1.0])
OTHERS = torch.tensor([3.0, 3.0, -3.0, -3.0, 3.0, -3.0, -0.0, -0.0])
CONDITION = torch.tensor([True, False] * 4)

CHOICES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where, both vary": lambda c, x, y: torch.where(c, x, y),
    "where, the other way": lambda c, x, y: torch.where(c, y, x),
    "where not": lambda c, x, y: torch.where(~c, x, y),
    "where, a constant second": lambda c, x, y: torch.where(c, x, 2.0),
    "where, a constant first": lambda c, x, y: torch.where(c, 2.0, x),
    "where not, a constant first": lambda c, x, y: torch.where(~c, 2.0, x),
    "where, -0.0 itself": lambda c, x, y: torch.where(c, -0.0, x),
    "masked_fill": lambda c, x, y: x.masked_fill(c, -torch.inf),
    "remainder": lambda c, x, y: torch.remainder(x, 3.0),
    "remainder of two": lambda c, x, y: torch.remainder(x, y + 5),
    "fmod": lambda c, x, y: torch.fmod(x, 3.0),
    "log_sigmoid of infinity": lambda c, x, y: nn.functional.logsigmoid(x / 0),
    "floor_divide": lambda c, x, y: torch.floor_divide(x, y.sign() * 3 + 0.5),
}


class Of(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, c: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 1 / self.function(c, x, y)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHOICES)
def test_zero_keeps_its_sign(name: str, dtype: torch.dtype, engine: str) -> None:
    pytest.importorskip(engine, reason="an engine under test")
    x, y = ZEROS.to(dtype), OTHERS.to(dtype)
    model = Of(CHOICES[name])
    fast = intarsia.compile(model, (CONDITION, x.clone().fill_(1.5), y), engines=[engine], min_block_size=1)
    torch.testing.assert_close(fast(CONDITION, x, y), model(CONDITION, x, y), equal_nan=True)
