"""Pooling: largest and mean of windows, sliding and adaptive, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import (
    from_the_front,
    is_float,
    left_where,
    per_axis,
    static,
    summed_up,
    used,
    whole,
    wide,
)
from intarsia.convert.aten.reduce import holds_somewhere
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten

# Sliding and adaptive windows spelled out as look-ups, for what no pooling kernel does as torch does.

Places = np.ndarray[Any, np.dtype[np.int64]]  # (windows, places in a window) along one axis


def sliding(size: int, kernel: int, stride: int, dilation: int) -> Places:
    """Places of every window that fits."""
    count = (size - dilation * (kernel - 1) - 1) // stride + 1
    return (np.arange(count)[:, None] * stride + np.arange(kernel) * dilation).astype(np.int64)


def within(places: Places, size: int) -> Places:
    """Positions beyond the ends, moved to the nearest valid one of their window: the maximum is the same."""
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
    """How many windows torch slides; none starts in the padding after the input."""
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


# Pooling itself.


def batched(x: Tensor, rank: int) -> Tensor:
    return F.unsqueeze(x, [0]) if x.ndim == rank + 1 else x


def unbatched(output: Tensor, x: Tensor, rank: int) -> Tensor:
    return F.squeeze(output, [0]) if x.ndim == rank + 1 else output


def _rank(ctx: Context) -> int:
    """How many dimensions the operator pools over, by its name."""
    return int(next(letter for letter in ctx.operator if letter.isdigit()))


def _of_all_ranks(name: str) -> list[Any]:
    return [getattr(aten, name.format(rank)).default for rank in (1, 2, 3)]


@converter(*_of_all_ranks("max_pool{}d"), *_of_all_ranks("max_pool{}d_with_indices"))
def max_pool(
    ctx: Context,
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    """The largest elements and, of the operators with indices, their places; None if nobody reads them."""
    has_places = isinstance(ctx.value, tuple | list)
    reads_places = has_places and used(ctx.node, 1)

    def results(values: Tensor, places: Tensor | None) -> Any:
        return (values, places if reads_places else None) if has_places else values

    rank = _rank(ctx)
    kernel = per_axis(kernel_size, rank, "kernel_size")
    strides = per_axis(stride, rank, "stride") if stride else kernel
    padded, dilations = per_axis(padding, rank, "padding"), per_axis(dilation, rank, "dilation")
    ends = list(padded)
    if ceil_mode:
        for i, size in enumerate(spatial_sizes(self, rank)):
            count = pooled_size(size, kernel[i], strides[i], padded[i], dilations[i], True)
            span = (count - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1
            ends[i] = max(span - size - padded[i], 0)
    x = wide(batched(self, rank))
    if not is_float(self) or any(end >= k for end, k in zip(ends, kernel, strict=True)):
        return results(*_max_by_windows(self, x, rank, kernel, strides, padded, ends, dilations))
    pooled = F.max_pool(
        x, kernel, strides=strides, pads=padded + ends, dilations=dilations, with_indices=reads_places
    )
    values = F.cast(unbatched(pooled[0], self, rank), self.dtype)
    if not reads_places:
        return results(values, None)
    # ONNX counts through the whole tensor, torch through each plane.
    plane: Any = 1
    for axis in range(2, 2 + rank):
        known = x.shape[axis]
        plane = plane * (known if isinstance(known, int) else F.size(x, axis))
    return results(values, unbatched(F.mod(pooled[1], plane), self, rank))


def _max_by_windows(
    self: Tensor,
    x: Tensor,
    rank: int,
    kernel: list[int],
    strides: list[int],
    begins: list[int],
    ends: list[int],
    dilations: list[int],
) -> tuple[Tensor, Tensor]:
    sizes = spatial_sizes(x, rank)
    places = [
        within(sliding(size + begin + end, k, s, d) - begin, size)
        for size, begin, end, k, s, d in zip(sizes, begins, ends, kernel, strides, dilations, strict=True)
    ]
    values, indices = _largest_of(unfold(x, places), flat_places(places, sizes))
    return F.cast(unbatched(values, self, rank), self.dtype), unbatched(indices, self, rank)


def _largest_of(unfolded: Tensor, flat: Places) -> tuple[Tensor, Tensor]:
    """Value and place of the first largest element of each window; the last NaN is above all."""
    chosen = F.argmax(unfolded, -1, keepdims=True)
    if is_float(unfolded):
        nans = F.isnan(unfolded)
        last = F.op("ArgMax", F.cast(nans, ir.DataType.INT32), axis=-1, select_last_index=1)
        chosen = F.where(holds_somewhere(nans, [unfolded.ndim - 1], True), last, chosen)
    values = F.squeeze(F.gather_elements(unfolded, chosen, -1), [-1])
    sizes: list[Any] = [
        size if isinstance(size, int) else F.size(chosen, i) for i, size in enumerate(chosen.shape[:-1])
    ]
    table = F.expand(F.constant(flat), [*sizes, flat.shape[-1]])
    return values, F.squeeze(F.gather_elements(table, chosen, -1), [-1])


@converter(*_of_all_ranks("avg_pool{}d"))
def avg_pool(
    ctx: Context,
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    rank, divisor = _rank(ctx), divisor_override
    kernel = per_axis(kernel_size, rank, "kernel_size")
    strides = per_axis(stride, rank, "stride") if stride else kernel
    padded = per_axis(padding, rank, "padding")
    x = wide(batched(self, rank))
    if not ceil_mode and is_float(self):
        include = count_include_pad or divisor is not None
        result = F.average_pool(x, kernel, strides=strides, pads=padded * 2, count_include_pad=include)
        if divisor is not None:
            result = F.mul(result, math.prod(kernel) / divisor)
        return F.cast(unbatched(result, self, rank), self.dtype)
    # By hand: the padded input, the sum of each window, and what torch divides each window by.
    sizes = spatial_sizes(x, rank)
    counts = [
        pooled_size(size, k, s, p, 1, ceil_mode)
        for size, k, s, p in zip(sizes, kernel, strides, padded, strict=True)
    ]
    ends = [
        max((n - 1) * s + k - size - p, 0)
        for n, s, k, size, p in zip(counts, strides, kernel, sizes, padded, strict=True)
    ]
    filled_in = F.pad(x, [0, 0, *padded, 0, 0, *ends]) if any(padded + ends) else x
    by = (
        divisor
        if divisor is not None
        else divisors(sizes, counts, kernel, strides, padded, count_include_pad)
    )
    if is_float(self):
        result = F.average_pool(filled_in, kernel, strides=strides, pads=[0] * (2 * rank))
        ratio = math.prod(kernel) / np.asarray(by, np.float64)
        result = F.mul(result, F.constant(ratio.astype(dtypes.to_numpy(x.dtype))))
    else:
        places = [
            sliding(size + p + e, k, s, 1)
            for size, p, e, k, s in zip(sizes, padded, ends, kernel, strides, strict=True)
        ]
        unfolded = unfold(filled_in, places)
        summed = summed_up(unfolded, [unfolded.ndim - 1])
        summed = left_where(summed, F.less(F.abs(summed), 0))  # the least integer has no magnitude
        # Towards zero; engines differ for what is negative.
        whole_part = F.div(F.abs(summed), F.constant(np.asarray(by).astype(dtypes.to_numpy(x.dtype))))
        result = F.mul(kernels.sign(summed), whole_part)
    return F.cast(unbatched(result, self, rank), self.dtype)


@converter(
    *_of_all_ranks("adaptive_avg_pool{}d"),
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(ctx: Context, self: Tensor, output_size: Any) -> Tensor:
    rank = _rank(ctx)
    out = per_axis(output_size, rank, "output_size")
    x = wide(batched(self, rank))
    if out == [1] * rank:
        result = F.op("GlobalAveragePool", x)
        return F.cast(unbatched(result, self, rank), self.dtype)
    sizes = spatial_sizes(x, rank)
    if all(size % n == 0 for size, n in zip(sizes, out, strict=True)):
        kernel = [size // n for size, n in zip(sizes, out, strict=True)]
        result = x if set(kernel) == {1} else F.average_pool(x, kernel, strides=kernel, pads=[0] * (2 * rank))
        return F.cast(unbatched(result, self, rank), self.dtype)
    # Windows of an axis have one or two widths; the mean over a box is the mean over its axes in turn.
    for i, (size, n) in enumerate(zip(sizes, out, strict=True)):
        places, real = adaptive(size, n)
        tail = [1] * (rank - 1 - i)
        gathered = F.gather(x, F.constant(places), axis=2 + i)
        windows = F.where(F.constant(real.reshape(n, -1, *tail)), gathered, 0.0)
        count = real.sum(1).reshape(n, *tail).astype(dtypes.to_numpy(x.dtype))
        x = F.div(F.reduce_sum(windows, [3 + i], keepdims=False), F.constant(count))
    return F.cast(unbatched(x, self, rank), self.dtype)


@converter(*_of_all_ranks("adaptive_max_pool{}d"))
def adaptive_max_pool(ctx: Context, self: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
    rank = _rank(ctx)
    out, sizes = per_axis(output_size, rank, "output_size"), spatial_sizes(self, rank)
    places = [adaptive(size, n)[0] for size, n in zip(sizes, out, strict=True)]
    values, indices = _largest_of(unfold(wide(self), places), flat_places(places, sizes))
    return F.cast(values, self.dtype), indices


@converter(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(
    ctx: Context, self: Tensor, indices: Tensor, output_size: Any, stride: Any = (), padding: Any = ()
) -> Tensor:
    rank, out = _rank(ctx), whole(output_size, "output_size")
    lead = [static(self, i) for i in range(self.ndim - rank)]
    x = wide(self)
    blank = F.full([*lead, math.prod(out)], 0, x.dtype)
    rows = [*lead, math.prod(spatial_sizes(self, rank))]
    places = from_the_front(F.reshape(indices, rows), math.prod(out))
    result = F.scatter_elements(blank, places, F.reshape(x, rows), axis=-1)
    return F.cast(F.reshape(result, [*lead, *out]), self.dtype)
