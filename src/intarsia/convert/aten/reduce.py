"""Reductions along dimensions, and running sums, products and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import (
    axes_of,
    filled,
    is_empty,
    is_float,
    left_where,
    product_of_integers,
    static,
    sum_of_integers,
    wide,
)
from intarsia.convert.aten.sizes import size, sizes
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
prims = torch.ops.prims

Layer = Callable[..., Tensor]


def reduced(ctx: Context, x: Tensor, dim: Any, keepdim: bool, layer: Layer, empty: float) -> Tensor:
    """`layer` over dimensions, in a dtype wide enough, cast to the dtype of the result."""
    if is_empty(x):
        return filled(ctx, empty)
    axes = axes_of(dim, x.ndim)
    result = layer(x, axes, keepdims=keepdim) if axes else x
    return F.cast(result, ctx.dtype)


def _sum(ctx: Context, operand: Tensor) -> Layer:
    """The sum of elements; sums of small integers or booleans stay small enough."""
    return sum_of_integers if ctx.dtype in dtypes.LONG and operand.dtype in dtypes.LONG else F.reduce_sum


def _product(ctx: Context) -> Layer:
    return product_of_integers if ctx.dtype in dtypes.LONG else _product_of_floats


def _product_of_floats(x: Tensor, axes: list[int] | None = None, *, keepdims: bool = True) -> Tensor:
    """In an order other than eager's, the product may overflow on the way: infinite, or NaN with a zero."""
    result = F.reduce_prod(x, axes, keepdims=keepdims)
    finite = F.equal(F.reduce_sum(F.mul(x, 0.0), axes, keepdims=keepdims), 0.0)  # of all factors
    return left_where(result, F.logical_and(finite, F.logical_or(F.isinf(result), F.isnan(result))))


def _accumulated(ctx: Context, x: Tensor) -> Tensor:
    """`x` in the dtype torch adds up in: that of the result, wider if that is short."""
    return wide(F.cast(x, ctx.dtype), halves=True)


@converter(aten.sum.default, aten.sum.dim_IntList)
def sum_of(
    ctx: Context, self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return reduced(ctx, _accumulated(ctx, self), dim, keepdim, _sum(ctx, self), 0)


@converter(aten.mean.default, aten.mean.dim)
def mean(ctx: Context, self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reduced(ctx, _accumulated(ctx, self), dim, keepdim, F.reduce_mean, math.nan)


@converter(aten.prod.default, aten.prod.dim_int)
def prod(
    ctx: Context, self: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return reduced(ctx, _accumulated(ctx, self), dim, keepdim, _product(ctx), 1)


def _flags(condition: Tensor) -> Tensor:
    return F.cast(condition, ir.DataType.INT32)


def holds_somewhere(condition: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return F.cast(F.reduce_max(_flags(condition), axes, keepdims=keepdims), ir.DataType.BOOL)


def holds_everywhere(condition: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return F.cast(F.reduce_min(_flags(condition), axes, keepdims=keepdims), ir.DataType.BOOL)


def _extreme(layer: Layer, worst: float) -> Layer:
    """Largest or smallest element; engines lose NaN, and rows that hold only infinities."""

    def extreme(x: Tensor, axes: list[int], *, keepdims: bool) -> Tensor:
        result = layer(x, axes, keepdims=keepdims)
        if not is_float(x):
            return result
        result = F.where(holds_everywhere(F.equal(x, worst), axes, keepdims), worst, result)
        return F.where(holds_somewhere(F.isnan(x), axes, keepdims), math.nan, result)

    return extreme


largest: Layer = _extreme(F.reduce_max, -math.inf)
smallest: Layer = _extreme(F.reduce_min, math.inf)


@converter(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def extreme(ctx: Context, self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    layer = largest if ctx.operator in ("amax", "max") else smallest
    return reduced(ctx, wide(self), list(dim), keepdim, layer, 0)


def _nonzero(x: Tensor) -> Tensor:
    """Where `x` is not zero; a NaN is not."""
    if x.dtype == ir.DataType.BOOL:
        return x
    return F.logical_not(F.equal(wide(x), 0))


@converter(
    *(aten.any.default, aten.any.dim, aten.any.dims),
    *(aten.all.default, aten.all.dim, aten.all.dims),
)
def truth_of(ctx: Context, self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    every = ctx.operator == "all"
    if dim is not None and not isinstance(dim, int) and not list(dim):
        return F.cast(_nonzero(self), ctx.dtype)  # an empty list reduces nothing here
    layer = F.reduce_min if every else F.reduce_max
    counts = _flags(_nonzero(self))
    if is_empty(self):
        return filled(ctx, every)
    result = layer(counts, axes_of(dim, self.ndim), keepdims=keepdim) if self.ndim else counts
    return F.cast(F.cast(result, ir.DataType.BOOL), ctx.dtype)


def _variance(ctx: Context, self: Tensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean, in the dtype to go on computing in."""
    x = wide(self, halves=True)
    axes = axes_of(dim, self.ndim)
    mean = F.reduce_mean(x, axes) if axes else x
    centred = F.sub(x, mean)
    squares = F.mul(centred, centred)
    summed = F.reduce_sum(squares, axes, keepdims=keepdim) if axes else squares
    count: Any = 1
    for axis in axes:
        extent = size(self, axis)
        count = count * (extent if isinstance(extent, int) else F.cast(extent, x.dtype))
    if isinstance(count, Tensor):
        freedom: Any = F.maximum(F.sub(count, float(correction)), 0.0)
    else:
        freedom = float(max(count - correction, 0))
    variance = F.div(summed, freedom)
    return variance, mean if keepdim or not axes else F.squeeze(mean, axes)


@converter(
    *(
        overload
        for packet in (aten.var, aten.std, aten.var_mean, aten.std_mean)
        for overload in (packet.default, packet.dim, packet.correction)
    )
)
def spread(
    ctx: Context,
    self: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    """Variance or deviation; of two of these operators, also the mean."""
    has_mean = ctx.operator.endswith("_mean")
    if is_empty(self):
        return tuple(filled(ctx, math.nan, i) for i in range(2)) if has_mean else filled(ctx, math.nan)
    taken = int(unbiased) if correction is None else correction
    variance, centre = _variance(ctx, self, dim, taken, keepdim)
    if ctx.operator.startswith("std"):  # eager adds up in float64, where squares of float32 do not overflow
        variance = F.sqrt(left_where(variance, F.isinf(variance)))
    result = F.cast(variance, ctx.dtype)
    if not has_mean:
        return result
    centre = left_where(centre, F.isinf(centre))  # eager's is infinite or NaN by the order it adds in
    return result, F.cast(centre, ctx.dtype)


@converter(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    ctx: Context, self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """`sum(|x|**p)**(1/p)` and its limits."""
    p = 2.0 if ord is None else float(ord)
    if is_empty(self):
        return filled(ctx, math.inf if p < 0 else 0)
    x = F.abs(wide(F.cast(self, ctx.dtype), halves=True))
    if math.isinf(p):
        return reduced(ctx, x, dim, keepdim, largest if p > 0 else smallest, 0)
    if p == 0:
        counts = F.cast(_nonzero(x), x.dtype)
        return reduced(ctx, counts, dim, keepdim, F.reduce_sum, 0)
    if self.ndim == 0:
        return F.cast(x, ctx.dtype)
    # Of one element each the norm is its size: torch takes no power, which might overflow.
    if p == 1 or all(self.shape[axis] == 1 for axis in axes_of(dim, self.ndim)):
        return reduced(ctx, x, dim, keepdim, F.reduce_sum, 0)
    if p == 2:
        return reduced(ctx, x, dim, keepdim, F.reduce_l2, 0)
    summed = F.reduce_sum(F.pow(x, p), axes_of(dim, self.ndim), keepdims=keepdim)
    return F.cast(F.pow(summed, 1 / p), ctx.dtype)


# Running sums, products and extremes.


def _shifted(x: Tensor, axis: int, step: int, fill: float) -> Tensor:
    """`x` moved along an axis by `step`, with `fill` moving in."""
    pads = [0] * (2 * x.ndim)
    pads[axis] = step
    return F.pad(F.slice(x, 0, static(x, axis) - step, axis=axis), pads, value=fill)


def _scan(x: Tensor, axis: int, fill: float, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    # In log2(n) steps: after step s every element holds the last 2**s ones.
    step = 1
    while step < static(x, axis):
        x = combine(_shifted(x, axis, step, fill), x)
        step *= 2
    return x


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    largest = F.maximum(a, b)
    shift = F.where(F.isinf(largest), 0.0, largest)
    return F.add(F.log(F.add(F.exp(F.sub(a, shift)), F.exp(F.sub(b, shift)))), shift)


_RUNNING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": F.cumsum,
    "cumprod": lambda x, axis: _scan(x, axis, 1, F.mul),
    "logcumsumexp": lambda x, axis: _scan(x, axis, -math.inf, _logaddexp),
}


@converter(*(getattr(aten, name).default for name in _RUNNING))
def running(ctx: Context, self: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    x = wide(F.cast(self, ctx.dtype), halves=True)
    return F.cast(_RUNNING[ctx.operator](x, dim % self.ndim) if self.ndim else x, ctx.dtype)


@converter(aten.cummax.default, aten.cummin.default)
def running_extreme(ctx: Context, self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if self.ndim == 0:
        return self, F.constant(0, ir.DataType.INT64)
    axis = dim % self.ndim
    extent = static(self, axis)
    x = wide(self, halves=True)
    places = F.reshape(F.constant(np.arange(extent, dtype=np.int64)), [-1, *[1] * (self.ndim - 1 - axis)])
    places = F.expand(places, sizes(x))
    better = F.greater_equal if ctx.operator == "cummax" else F.less_equal
    step = 1
    while step < extent:
        before, where_before = (_moved(t, axis, step) for t in (x, places))
        # The later one wins a tie, and a NaN wins over all that came before it.
        later = better(x, before)
        if is_float(x):
            later = F.logical_or(F.isnan(x), F.logical_and(F.logical_not(F.isnan(before)), later))
        x, places = F.where(later, x, before), F.where(later, places, where_before)
        step *= 2
    return F.cast(x, self.dtype), places


def _moved(x: Tensor, axis: int, step: int) -> Tensor:
    """`x` moved along an axis; the first elements, without an earlier one, stay."""
    head = F.slice(x, 0, step, axis=axis)
    return F.concat([head, F.slice(x, 0, static(x, axis) - step, axis=axis)], axis)


# torch's primitive reductions, which some decompositions end in.


@converter(prims.sum.default, prims.prod.default)
def prims_reduction(ctx: Context, inp: Tensor, dims: Any, *, output_dtype: Any = None) -> Tensor:
    if dims is not None and not dims:  # no dimensions mean none here, and all of them in ATen
        raise ConversionError("dims=() is not handled")
    return (sum_of if ctx.operator == "sum" else prod)(ctx, inp, dims)
