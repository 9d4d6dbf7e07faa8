"""Powers of integers are exact, wrap as torch's do, and know negative exponents."""

from __future__ import annotations

import pytest
import torch
from tests.convert.equal import assert_equal
from tests.convert.one_node import answers
from torch import nn
from torch.export import Dim

import intarsia

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)


def _of(dtype: torch.dtype, *values: int) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    taken = [v for v in (*values, limits.min, limits.max) if limits.min <= v <= limits.max]
    drawn = torch.randint(limits.min, limits.max, (20,), generator=G)
    return torch.cat([torch.tensor(taken), drawn]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_base_to_every_exponent(dtype: torch.dtype) -> None:
    bases = _of(dtype, 0, 1, -1, 2, -2, 3, -3, 5, 10, 12345)
    exponents = _of(dtype, 0, 1, -1, 2, -2, 3, 7, 8, 31, 32, 33, 62, 63, 64, 65)
    have, want = answers(aten.pow.Tensor_Tensor, bases[:, None], exponents[None])
    assert torch.equal(have, want)
    have, want = answers(aten.pow.Scalar, 3, exponents)
    assert torch.equal(have, want)


def test_any_number_of_exponents() -> None:
    calls = [(torch.arange(-3, n - 3),) for n in (9, 4, 12)]
    assert_equal(
        lambda x: torch.pow(-2, x), *calls, dynamic=({0: Dim("n", max=64)},), engines=("onnxruntime",)
    )


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_roots_of_special_values_are_pytorchs_own(exponent: float, dtype: torch.dtype, engine: str) -> None:
    """It takes those of float16 as powers: of -inf the root is inf there, and NaN elsewhere."""

    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(exponent)

    x = torch.tensor([-torch.inf, torch.inf, -0.0, 0.0, torch.nan, -1.0, 4.0, 0.25], dtype=dtype)
    fast = intarsia.compile(Root(), (torch.ones_like(x),), engines=[engine], min_block_size=1)
    torch.testing.assert_close(fast(x), Root()(x), equal_nan=True)
    zeros = x == 0
    assert torch.equal(torch.signbit(fast(x)[zeros]), torch.signbit(Root()(x)[zeros]))
