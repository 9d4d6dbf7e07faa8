"""Integers beyond what floats hold: sums, products and remainders are exact, and wrap as torch's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert.equal import assert_equal
from tests.convert.one_node import answers
from torch.export import Dim

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
LIMITS = torch.iinfo(torch.int64)
LARGE = torch.randint(LIMITS.min, LIMITS.max, (5, 7, 3), generator=G)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.sum.default, ()),
        (aten.sum.dim_IntList, ([1],)),
        (aten.sum.dim_IntList, ([0, 2], True)),
        (aten.nansum.default, ([1],)),
        (aten.prod.default, ()),
        (aten.prod.dim_int, (1,)),
        (aten.cumsum.default, (1,)),
        (aten.fmod.Tensor, (LARGE.flip(0) // 3 + 1,)),
        (aten.remainder.Tensor, (LARGE.flip(0) // 3 + 1,)),
    ],
)
def test_exact(target: Any, args: tuple[Any, ...]) -> None:
    have, want = answers(target, LARGE, *args)
    assert torch.equal(have, want)
    small = (LARGE >> 40).to(torch.int32)
    have, want = answers(target, small, *(a >> 42 | 1 if isinstance(a, torch.Tensor) else a for a in args))
    assert torch.equal(have, want)


def test_sums_at_any_size() -> None:
    calls = [(LARGE[:, :n].contiguous(),) for n in (4, 7, 1, 0)]
    assert_equal(
        lambda x: x.sum(1), *calls, dynamic=({1: Dim("n", min=0, max=64)},), engines=("onnxruntime",)
    )
