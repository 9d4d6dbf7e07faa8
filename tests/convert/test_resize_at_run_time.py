"""Resizing to a size that is known only at run time, and pairs of a number of rows that varies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from tests.convert.equal import assert_equal
from torch.export import Dim

G = torch.Generator().manual_seed(0)
MODES = {
    "nearest": (1, {}), "nearest 2": (2, {}), "nearest 3": (3, {}), "nearest-exact": (2, {}),
    "linear": (1, {"align_corners": False}), "linear aligned": (1, {"align_corners": True}),
    "bilinear": (2, {"align_corners": False}), "bilinear aligned": (2, {"align_corners": True}),
    "bicubic": (2, {"align_corners": False}), "bicubic aligned": (2, {"align_corners": True}),
    "trilinear": (3, {"align_corners": False}), "trilinear aligned": (3, {"align_corners": True}),
}  # fmt: skip
SMALL = torch.randn(1, 2, 5, 4, 6, generator=G)


@pytest.mark.parametrize("name", MODES)
def test_to_the_size_of_another(name: str) -> None:
    rank, options = MODES[name]
    mode = name.split()[0]

    def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return TF.interpolate(x, size=other.shape[2:], mode=mode, **options)

    x = SMALL.reshape(1, -1, *SMALL.shape[5 - rank :])
    calls = [(x, torch.zeros(1, 1, *sizes[:rank])) for sizes in ((7, 9, 8), (3, 2, 2), (5, 6, 12))]
    varies = {2 + i: Dim(f"n{i}", min=2, max=64) for i in range(rank)}
    assert_equal(like, *calls, dynamic=({}, varies), engines=("onnxruntime",), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [2.0, 1.5, 0.5])
@pytest.mark.parametrize(
    "name", ["nearest", "nearest 2", "nearest 3", "nearest-exact", "linear", "trilinear"]
)
def test_by_a_factor_of_sizes_that_vary(name: str, scale: float) -> None:
    rank, options = MODES[name]

    def enlarged(x: torch.Tensor) -> torch.Tensor:
        return TF.interpolate(x, scale_factor=scale, mode=name.split()[0], **options)

    calls = [(torch.randn(1, 2, *sizes[:rank], generator=G),) for sizes in ((5, 4, 6), (7, 9, 8), (4, 11, 5))]
    varies = {2 + i: Dim(f"n{i}", min=4, max=64) for i in range(rank)}
    assert_equal(enlarged, *calls, dynamic=(varies,), engines=("onnxruntime",), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_pairs_of_rows_that_vary(p: float) -> None:
    calls = [(torch.randn(n, 3, generator=G),) for n in (4, 7, 3)]
    pairs: Callable[[Any], Any] = lambda x: torch.pdist(x, p)  # noqa: E731
    assert_equal(pairs, *calls, dynamic=({0: Dim.AUTO},), engines=("onnxruntime",))
