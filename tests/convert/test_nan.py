"""NaN and infinities through reductions and orderings, where engines by themselves lose them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from tests.convert import drivers
from tests.convert.equal import assert_equal
from torch.export import Dim

ROWS = torch.tensor(
    [
        [1.0, math.nan, 3.0, math.inf],
        [math.nan, 2.0, 3.0, -1.0],
        [1.0, 2.0, 3.0, math.nan],
        [-math.inf] * 4,
        [math.inf] * 4,
        [0.0, -0.5, 2.0, 2.0],
    ]
)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: torch.amax(x, 1),
    "amin": lambda x: torch.amin(x, 1),
    "max.dim": lambda x: tuple(torch.max(x, 1)),
    "min.dim": lambda x: tuple(torch.min(x, 1)),
    "argmax": lambda x: torch.argmax(x, 1),
    "argmin": lambda x: torch.argmin(x, 1),
    "any": lambda x: torch.any(x, 1),
    "all": lambda x: torch.all(x, 1),
    "sort": lambda x: tuple(torch.sort(x, dim=1, stable=True)),
    "sort down": lambda x: tuple(torch.sort(x, dim=1, descending=True, stable=True)),
    "topk": lambda x: torch.topk(x, 2, 1)[0],
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "cummax": lambda x: tuple(torch.cummax(x, 1)),
    "cummin": lambda x: tuple(torch.cummin(x, 1)),
    "nansum": lambda x: torch.nansum(x, 1),
    "median": lambda x: torch.median(x, 1)[0],
    "nanmedian": lambda x: torch.nanmedian(x, 1)[0],
    "nanmedian of all": lambda x: torch.nanmedian(x),
    "count_nonzero": lambda x: torch.count_nonzero(x, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_nan_and_infinity(name: str) -> None:
    assert_equal(FUNCTIONS[name], (ROWS,), left=("openvino",))


PLANES = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
PLANES[0, 0, 2:4, 3], PLANES[1, 2, 6, 7], PLANES[0, 1] = math.nan, math.nan, math.inf
PLANES[1, 0, 0], PLANES[1, 1, :, 2], PLANES[1, 1, 3, 3] = math.nan, -math.inf, math.nan
POOLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: f.max_pool2d(x, 2),
    "padded": lambda x: f.max_pool2d(x, 3, 2, 1),
    "open end": lambda x: f.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "places": lambda x: f.max_pool2d(x, 3, 2, 1, return_indices=True),
    "spread": lambda x: f.max_pool2d(x, 2, 1, dilation=2, return_indices=True),
    "one dimension": lambda x: f.max_pool1d(x.flatten(0, 1).flatten(1), 5, 3, return_indices=True),
    "three": lambda x: f.max_pool3d(x.unsqueeze(0), (1, 3, 2), return_indices=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_the_last_nan_of_a_window_is_taken(name: str) -> None:
    assert_equal(POOLS[name], (PLANES,), left=drivers.ENGINES)


def test_places_of_nan_at_sizes_that_vary() -> None:
    sizes = {2: Dim("height", min=6, max=64), 3: Dim("width", min=6, max=64)}
    wider = torch.cat([PLANES, PLANES.flip(3)], 3)
    assert_equal(POOLS["places"], (PLANES,), (wider,), dynamic=(sizes,), left=drivers.ENGINES)
