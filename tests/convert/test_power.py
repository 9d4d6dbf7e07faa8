"""Powers of integers are exact, wrap as torch's do, and know negative exponents."""

from __future__ import annotations

import pytest
import torch
from tests.convert.equal import assert_equal
from tests.convert.one_node import answers
from torch.export import Dim

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
