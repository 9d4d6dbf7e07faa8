"""Casts to integers that hold less than what is cast to them, alone and after another cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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


class Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_denormals_keep_their_sign(name: str, dtype: torch.dtype) -> None:
    model, x = Of(MADE[name]), VALUES.to(dtype)
    fast = intarsia.compile(model, (torch.ones_like(x),), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_reciprocals_are_those_of_pytorch_to_the_last_bit() -> None:
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    fast = intarsia.compile(Of(torch.reciprocal), (x,), engines=["onnxruntime"], min_block_size=1)
    assert torch.equal(fast(x), x.reciprocal())
