"""Reciprocals of denormals, and what is made of them, have the right sign."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia

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
