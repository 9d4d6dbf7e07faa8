"""Sliding and adaptive windows spelled out as look-ups, for what no pooling kernel does as torch does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from intarsia.convert.aten.precision import static, whole
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

Places = np.ndarray[Any, np.dtype[np.int64]]  # (windows, places in a window) along one axis


def per_axis(values: Any, rank: int, what: str) -> list[int]:
    items = whole(values, what)
    return items * rank if len(items) == 1 else items


def sliding(size: int, kernel: int, stride: int, dilation: int) -> Places:
    """Places of every window that fits."""
    count = (size - dilation * (kernel - 1) - 1) // stride + 1
    return (np.arange(count)[:, None] * stride + np.arange(kernel) * dilation).astype(np.int64)


def within(places: Places, size: int) -> Places:
    """Places beyond the ends moved to the nearest one of their window that is not: no new largest element."""
    inside = (places >= 0) & (places < size)
    if not inside.any(1).all():
        raise ConversionError("a window with nothing but padding is not handled")
    first = np.take_along_axis(places, inside.argmax(1)[:, None], 1)
    last = np.take_along_axis(places, (places.shape[1] - 1 - inside[:, ::-1].argmax(1))[:, None], 1)
    return np.clip(places, first, last)


def adaptive(size: int, windows: int) -> tuple[Places, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Places of torch's adaptive windows, short ones filled with their last place, and which are real."""
    starts = [i * size // windows for i in range(windows)]
    ends = [-(-(i + 1) * size // windows) for i in range(windows)]
    width = max(end - start for start, end in zip(starts, ends, strict=True))
    places = np.array([[min(s + k, e - 1) for k in range(width)] for s, e in zip(starts, ends, strict=True)])
    real = np.array([[s + k < e for k in range(width)] for s, e in zip(starts, ends, strict=True)])
    return places.astype(np.int64), real


def unfold(x: Tensor, places: Sequence[Places]) -> Tensor:
    """The last dimensions of `x` as windows: (..., windows of each axis, all places of a window)."""
    rank = len(places)
    lead = x.ndim - rank
    for i, table in enumerate(places):
        x = F.gather(x, F.constant(table), axis=lead + 2 * i)
    order = [*range(lead), *(lead + 2 * i for i in range(rank)), *(lead + 2 * i + 1 for i in range(rank))]
    turned = F.transpose(x, order) if rank > 1 else x
    sizes: list[Any] = [
        size if isinstance(size, int) else F.size(x, i) for i, size in enumerate(x.shape[:lead])
    ]
    counts = [table.shape[0] for table in places]
    return F.reshape(turned, [*sizes, *counts, math.prod(table.shape[1] for table in places)])


def flat_places(places: Sequence[Places], sizes: Sequence[int]) -> Places:
    """Where each place of each window lies in the flattened plane: (windows..., places)."""
    rank = len(places)
    total = np.zeros((1,) * (2 * rank), np.int64)
    for i, table in enumerate(places):
        shape = [1] * (2 * rank)
        shape[i], shape[rank + i] = table.shape
        total = total + table.reshape(shape) * math.prod(sizes[i + 1 :])
    return total.reshape(*(table.shape[0] for table in places), -1)


def spatial_sizes(x: Tensor, rank: int) -> list[int]:
    return [static(x, x.ndim - rank + i) for i in range(rank)]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """How many windows torch slides; none starts in the padding behind the input."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil else span // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def divisors(
    sizes: Sequence[int],
    counts: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    padded: Sequence[int],
    include: bool,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many elements torch counts in each window: up to the padding's end, or real ones only."""
    rank = len(sizes)
    total = np.ones((1,) * rank, np.int64)
    for i in range(rank):
        start = np.arange(counts[i]) * strides[i] - padded[i]
        end = np.minimum(start + kernel[i], sizes[i] + padded[i])
        if not include:
            start, end = np.maximum(start, 0), np.minimum(end, sizes[i])
        total = total * (end - start).reshape([-1 if j == i else 1 for j in range(rank)])
    return total
