"""Values looked for among others: searchsorted, bucketize, isin, one_hot."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.demands import from_the_front, left_where, zero_unless
from intarsia.convert.aten.sizes import END, arange, int64, size
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType
_COMPARED = {D.BFLOAT16: D.FLOAT, D.BOOL: D.INT32}


@converter(aten.searchsorted.Tensor)
def searchsorted(
    ctx: ConversionContext,
    sorted_sequence: Tensor,
    self: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    line = sorted_sequence if sorter is None else _sorted(sorted_sequence, sorter)
    return _count(ctx, line, self, right or side == "right")


@converter(aten.searchsorted.Scalar)
def searchsorted_scalar(
    ctx: ConversionContext,
    sorted_sequence: Tensor,
    self: float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    line = sorted_sequence if sorter is None else _sorted(sorted_sequence, sorter)
    return _count(ctx, line, self, right or side == "right")


@converter(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    ctx: ConversionContext, self: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _count(ctx, boundaries, self, right)


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


def _count(ctx: ConversionContext, line: Tensor, values: Any, right: bool) -> Tensor:
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


@converter(aten.isin.Tensor_Tensor)
def isin(
    ctx: ConversionContext,
    elements: Tensor,
    test_elements: Tensor,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Tensor:
    return _isin(ctx, elements, test_elements, invert)


@converter(aten.isin.Tensor_Scalar)
def isin_scalar(
    ctx: ConversionContext,
    elements: Tensor,
    test_element: float,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Tensor:
    return _isin(ctx, elements, test_element, invert)


@converter(aten.isin.Scalar_Tensor)
def isin_of_scalar(
    ctx: ConversionContext,
    element: float,
    test_elements: Tensor,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Tensor:
    return _isin(ctx, element, test_elements, invert)


def _isin(ctx: ConversionContext, elements: Any, among: Any, invert: bool) -> Tensor:
    a, b = ctx.common(elements, among)
    a, b = (F.cast(t, _COMPARED.get(t.dtype, t.dtype)) for t in (a, b))
    same = F.cast(F.equal(F.unsqueeze(a, [a.ndim]), F.reshape(b, [-1])), D.INT32)
    found = F.greater(F.reduce_sum(same, [a.ndim], keepdims=False), 0)
    return F.logical_not(found) if invert else found


@converter(aten.one_hot.default)
def one_hot(ctx: ConversionContext, self: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ConversionError(f"num_classes={num_classes}, to be read from the data, is not handled")
    outside = F.logical_or(F.less(self, 0), F.less(num_classes - 1, self))
    classes = F.add(arange(num_classes), zero_unless(outside))
    return F.cast(F.equal(F.unsqueeze(self, [self.ndim]), classes), D.INT64)
