"""NaN and infinities through reductions and orderings, where engines by themselves lose them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.convert.equal import assert_equal

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
    assert_equal(FUNCTIONS[name], (ROWS,), left=True)
