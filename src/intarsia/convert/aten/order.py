"""Extremes, sorting, and search: topk, argmax, sort, searchsorted, isin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import (
    filled,
    from_the_front,
    is_empty,
    is_float,
    left_where,
    static,
    used,
    wide,
    zero_unless,
)
from intarsia.convert.aten.reduce import holds_somewhere
from intarsia.convert.aten.sizes import END, arange, int64, size, smaller
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType


def _place(x: Tensor, axis: int, largest: bool) -> Tensor:
    """Index of the first extreme along an axis, which is kept; a NaN is the extreme, as in torch."""
    layer = F.argmax if largest else F.argmin
    place = layer(x, axis, keepdims=True)
    return _first_nan(x, axis, place) if is_float(x) else place


def _first_nan(x: Tensor, axis: int, otherwise: Tensor) -> Tensor:
    """Index of the first NaN along an axis, which is kept."""
    nans = F.isnan(x)
    first = F.argmax(F.cast(nans, ir.DataType.INT32), axis, keepdims=True)
    return F.where(holds_somewhere(nans, [axis], True), first, otherwise)


@converter(aten.argmax.default, aten.argmin.default)
def arg_extreme(ctx: Context, self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if self.ndim == 0:
        return F.constant(0, ir.DataType.INT64)
    x, largest = wide(self, halves=True), ctx.operator == "argmax"
    if dim is None:
        place = _place(F.reshape(x, [-1]), 0, largest)
        return F.reshape(place, [1] * self.ndim if keepdim else [])
    place = _place(x, dim % self.ndim, largest)
    return place if keepdim else F.squeeze(place, [dim])


@converter(aten.max.dim, aten.min.dim)
def extreme_dim(ctx: Context, self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if self.ndim == 0:
        return self, F.constant(0, ir.DataType.INT64)
    axis = dim % self.ndim
    place = _place(wide(self, halves=True), axis, ctx.operator == "max")
    return _picked(self, place, axis, keepdim)


def pick(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Elements of `x` at indices along an axis."""
    carrier = F.cast(x, ir.DataType.FLOAT) if x.dtype == ir.DataType.BFLOAT16 else x
    return F.cast(F.gather_elements(carrier, indices, axis), x.dtype)


def _picked(x: Tensor, indices: Tensor, axis: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    values = pick(x, indices, axis)
    return (values, indices) if keepdim else (F.squeeze(values, [axis]), F.squeeze(indices, [axis]))


def best(x: Tensor, k: Any, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k largest or smallest in order, equal ones by place; NaN is above everything, as in torch."""
    key = wide(x, halves=True)
    if not is_float(key):
        values, indices = F.topk(key, k, axis, largest=largest)
        # OpenVINO cannot cast what TopK makes to bool.
        truth = x.dtype == ir.DataType.BOOL
        return F.logical_not(F.equal(values, 0)) if truth else F.cast(values, x.dtype), indices
    if x.dtype == key.dtype and not _is_share(x):
        indices = _beyond_numbers(key, k, axis, largest)
    else:  # no half is as large as the largest of floats, which is free for infinity then
        top = torch.finfo(dtypes.to_torch(key.dtype)).max
        key = F.where(F.isnan(key), math.inf, F.minimum(key, top))
        indices = F.topk(key, k, axis, largest=largest)[1]
    return pick(x, indices, axis), indices


def _is_share(x: Tensor) -> bool:
    """Whether a tensor holds values from 0 to 1 that add up to 1, such as scores for a ranking."""
    parent = x.get_parent()
    return parent is not None and parent.kind in ("Softmax", "Sigmoid")


def _beyond_numbers(key: Tensor, k: Any, axis: int, largest: bool) -> Tensor:
    """The positions of the k best, including infinities and NaN: no float can represent NaN in an order.

    Numbers are ordered with both at infinity, then both among themselves: they are in the same places.
    """
    nan = F.isnan(key)
    rank = F.where(nan, 2.0, F.where(F.equal(key, math.inf), F.constant(1.0, torch.float32), 0.0))
    places = F.topk(F.where(nan, math.inf, key), k, axis, largest=largest)[1]
    ranked = F.topk(rank, k, axis, largest=largest)[1]
    return F.where(F.greater(F.gather_elements(rank, places, axis), 0.0), ranked, places)


def in_order(x: Tensor, found: tuple[Tensor, Tensor], axis: int) -> tuple[Tensor, Tensor]:
    """The sorted values, equal ones by position: not every engine preserves their order.

    Every run of equal values is numbered, and (run, place) are sorted as one number.
    """
    count = x.shape[axis]
    if count == 1:
        return found
    values, indices = found
    extent = size(x, axis)
    runs = F.cumsum(F.cast(F.logical_not(_like_the_next(values, axis)), ir.DataType.INT64), axis)
    first = F.mul(F.slice(indices, 0, 1, axis=axis), 0)
    places = F.add(F.mul(F.concat([first, runs], axis), extent), indices)
    if isinstance(count, int) and count * count > 2**31:
        places = F.minimum(places, count * count)  # an engine without 64-bit integers must see that
    order = F.topk(places, extent, axis, largest=False)[1]
    return values, F.gather_elements(indices, order, axis)


def _like_the_next(values: Tensor, axis: int) -> Tensor:
    """Where an element of a sorted tensor equals the one after it; all NaN are alike."""
    key = wide(values, halves=True)
    before, after = F.slice(key, 0, -1, axis=axis), F.slice(key, 1, END, axis=axis)
    same = F.equal(before, after)
    if is_float(key):
        same = F.logical_or(same, F.logical_and(F.isnan(before), F.isnan(after)))
    return same


def without_ties(x: Tensor, k: Any, axis: int, largest: bool, first: int = 0) -> tuple[Tensor, Tensor]:
    """The k best, but PyTorch runs a call with equal values among them, or at the border.

    Among equal elements, the order depends on torch's kernel, and values that are looked up by their
    positions differ. Places before `first` do not matter.
    """
    count = x.shape[axis]
    if count == 1:
        return best(x, k, axis, largest)
    if isinstance(count, int) and isinstance(k, int):
        more: Any = min(k + 1, count)
    else:
        more = smaller(k + 1, size(x, axis))
    values, indices = best(x, more, axis, largest)
    tied = _like_the_next(F.slice(values, first, END, axis=axis) if first else values, axis)
    indices = F.add(indices, zero_unless(tied))
    if isinstance(more, int) and more == k:
        return values, indices
    return F.slice(values, 0, k, axis=axis), F.slice(indices, 0, k, axis=axis)


def _tells_places(ctx: Context) -> bool:
    """Whether the second result, where the elements stood, is read."""
    return isinstance(ctx.value, tuple | list) and used(ctx.node, 1)


def _ordered(
    ctx: Context, self: Tensor, k: Any, dim: int, largest: bool, stable: bool = False
) -> tuple[Tensor, Tensor]:
    if self.ndim == 0:
        return self, F.constant(0, ir.DataType.INT64)
    axis = dim % self.ndim
    if stable:
        return in_order(self, best(self, k, axis, largest), axis)
    return (without_ties if _tells_places(ctx) else best)(self, k, axis, largest)


@converter(aten.topk.default)
def topk(
    ctx: Context, self: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return _ordered(ctx, self, k, dim, largest)


@converter(aten.sort.default, aten.sort.stable)
def sort(
    ctx: Context, self: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = False
) -> tuple[Tensor, Tensor]:
    return _ordered(ctx, self, size(self, dim) if self.ndim else 1, dim, descending, bool(stable))


@converter(aten.kthvalue.default)
def kthvalue(
    ctx: Context, self: Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if self.ndim == 0:
        return self, F.constant(0, ir.DataType.INT64)
    axis = dim % self.ndim
    if _tells_places(ctx):
        values, indices = without_ties(self, k, axis, False, first=max(k - 2, 0))
    else:
        values, indices = best(self, k, axis, False)
    chosen = tuple(F.slice(x, k - 1, k, axis=axis) for x in (values, indices))
    result = chosen if keepdim else tuple(F.squeeze(x, [axis]) for x in chosen)
    return result[0], result[1]


@converter(aten.median.dim)
def median_dim(ctx: Context, self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower median; a NaN anywhere is the median."""
    if self.ndim == 0:
        return kthvalue(ctx, self, 1, dim, keepdim)
    axis = dim % self.ndim
    middle = (static(self, axis) + 1) // 2
    if not is_float(self):
        return kthvalue(ctx, self, middle, axis, keepdim)
    indices = kthvalue(ctx, self, middle, axis, True)[1]
    return _picked(self, _first_nan(wide(self, halves=True), axis, indices), axis, keepdim)


@converter(aten.nanmedian.dim)
def nanmedian_dim(ctx: Context, self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower median of the elements that are not NaN; a row of NaN has none."""
    if self.ndim == 0 or not is_float(self):
        return median_dim(ctx, self, dim, keepdim)
    axis = dim % self.ndim
    order = (without_ties if _tells_places(ctx) else best)(self, size(self, axis), axis, False)[1]
    numbers = F.cast(F.logical_not(F.isnan(wide(self, halves=True))), ir.DataType.INT64)
    count = F.reduce_sum(numbers, [axis], keepdims=True)
    # Numbers come before NaN: the middle one of them, or of none the first.
    middle = F.div(F.maximum(F.sub(count, 1), 0), 2)
    indices = F.gather_elements(order, middle, axis)
    return _picked(self, indices, axis, keepdim)


@converter(aten.median.default, aten.nanmedian.default)
def median(ctx: Context, self: Tensor) -> Tensor:
    if is_empty(self):
        return filled(ctx, math.nan)
    if self.ndim == 0:
        return self
    along = median_dim if ctx.operator == "median" else nanmedian_dim
    return along(ctx, F.reshape(self, [-1]), 0)[0]


# Values looked for among others: searchsorted, bucketize, isin, one_hot.

_COMPARED = {D.BFLOAT16: D.FLOAT, D.BOOL: D.INT32}


@converter(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Context,
    sorted_sequence: Tensor,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    line = sorted_sequence if sorter is None else _sorted(sorted_sequence, sorter)
    return _rank_of(ctx, line, self, right or side == "right")


@converter(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    ctx: Context, self: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _rank_of(ctx, boundaries, self, right)


def _sorted(line: Tensor, sorter: Tensor) -> Tensor:
    axis = line.ndim - 1
    return F.gather_elements(line, from_the_front(sorter, size(line, axis)), axis)


def _unsorted(line: Tensor) -> Tensor | None:
    """Where a line does not rise, or holds NaN: eager's answer then depends on where it starts to search."""
    axis, known = line.ndim - 1, line.constant
    if known is not None:
        numbers = known.astype(np.float64) if line.dtype in dtypes.FLOATS else known
        if not (numbers[..., 1:] >= numbers[..., :-1]).all() or np.isnan(numbers).any():
            raise ConversionError("boundaries that are not sorted, or hold NaN, are not handled")
        return None
    short = F.cast(line, _COMPARED.get(line.dtype, line.dtype))
    extent = line.shape[axis]
    if isinstance(extent, int) and extent < 2:
        return F.isnan(short) if extent and short.dtype in dtypes.FLOATS else None
    rises = F.less_equal(F.slice(short, 0, -1, axis=axis), F.slice(short, 1, END, axis=axis))
    return F.logical_not(rises)


def _rank_of(ctx: Context, line: Tensor, values: Any, right: bool) -> Tensor:
    """How many elements of the sorted `line` lie before each value; NaN comes after all numbers."""
    unsorted = _unsorted(line)
    a, b = ctx.common(line, values)
    a, b = (F.cast(t, _COMPARED.get(t.dtype, t.dtype)) for t in (a, b))
    each = F.unsqueeze(b, [b.ndim])
    row = a if a.ndim == 1 else F.unsqueeze(a, [a.ndim - 1])
    before = F.cast(F.less_equal(row, each) if right else F.less(row, each), D.INT64)
    count = F.reduce_sum(before, [before.ndim - 1], keepdims=False)
    if b.dtype in dtypes.FLOATS:
        count = F.where(F.isnan(b), int64(size(line, line.ndim - 1)), count)
    return F.cast(count if unsorted is None else left_where(count, unsorted), ctx.dtype)


@converter(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(
    ctx: Context,
    elements: Tensor | None = None,
    test_elements: Tensor | None = None,
    element: Any = None,
    test_element: Any = None,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Tensor:
    sought = element if elements is None else elements
    among = test_element if test_elements is None else test_elements
    a, b = ctx.common(sought, among)
    a, b = (F.cast(t, _COMPARED.get(t.dtype, t.dtype)) for t in (a, b))
    same = F.cast(F.equal(F.unsqueeze(a, [a.ndim]), F.reshape(b, [-1])), D.INT32)
    is_member = F.greater(F.reduce_sum(same, [a.ndim], keepdims=False), 0)
    return F.logical_not(is_member) if invert else is_member


@converter(aten.one_hot.default)
def one_hot(ctx: Context, self: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ConversionError(f"num_classes={num_classes}, read from the data, is not handled")
    outside = F.logical_or(F.less(self, 0), F.less(num_classes - 1, self))
    classes = F.add(arange(num_classes), zero_unless(outside))
    return F.cast(F.equal(F.unsqueeze(self, [self.ndim]), classes), D.INT64)
