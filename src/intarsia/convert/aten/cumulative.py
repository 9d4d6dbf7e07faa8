"""Running sums, products and extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.precision import filled, is_empty, is_float, static, wide
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.cumsum.default)
def cumsum(ctx: ConversionContext, self: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    if is_empty(self):
        return filled(ctx)
    x = wide(F.cast(self, ctx.dtype), halves=True)
    return F.cast(x if self.ndim == 0 else F.cumsum(x, dim % self.ndim), ctx.dtype)


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


@converter(aten.cumprod.default)
def cumprod(ctx: ConversionContext, self: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    if is_empty(self):
        return filled(ctx)
    x = wide(F.cast(self, ctx.dtype), halves=True)
    return F.cast(x if self.ndim == 0 else _scan(x, dim % self.ndim, 1, F.mul), ctx.dtype)


@converter(aten.logcumsumexp.default)
def logcumsumexp(ctx: ConversionContext, self: Tensor, dim: int) -> Tensor:
    if is_empty(self):
        return filled(ctx)
    x = wide(self, halves=True)
    return F.cast(x if self.ndim == 0 else _scan(x, dim % self.ndim, -torch.inf, _logaddexp), ctx.dtype)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    largest = F.maximum(a, b)
    shift = F.where(F.isinf(largest), 0.0, largest)
    return F.add(F.log(F.add(F.exp(F.sub(a, shift)), F.exp(F.sub(b, shift)))), shift)


def _running_extreme(ctx: ConversionContext, self: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    if is_empty(self):
        return filled(ctx, output=0), filled(ctx, output=1)
    if self.ndim == 0:
        return self, F.constant(0, ir.DataType.INT64)
    axis = dim % self.ndim
    size = static(self, axis)
    x = F.cast(self, ir.DataType.INT32) if self.dtype == ir.DataType.BOOL else wide(self, halves=True)
    places = F.reshape(F.constant(np.arange(size, dtype=np.int64)), [-1, *[1] * (self.ndim - 1 - axis)])
    sizes = [size if isinstance(size, int) else F.size(x, i) for i, size in enumerate(x.shape)]
    places = F.expand(places, sizes)
    better = F.greater_equal if largest else F.less_equal
    step = 1
    while step < size:
        before, where_before = (_moved(t, axis, step) for t in (x, places))
        # The later one wins a tie, and a NaN wins over all that came before it.
        later = better(x, before)
        if is_float(x):
            later = F.logical_or(F.isnan(x), F.logical_and(F.logical_not(F.isnan(before)), later))
        x, places = F.where(later, x, before), F.where(later, places, where_before)
        step *= 2
    return F.cast(x, self.dtype), places


def _moved(x: Tensor, axis: int, step: int) -> Tensor:
    """`x` moved along an axis; the first ones, which have none before them, stay."""
    head = F.slice(x, 0, step, axis=axis)
    return F.concat([head, F.slice(x, 0, static(x, axis) - step, axis=axis)], axis)


@converter(aten.cummax.default)
def cummax(ctx: ConversionContext, self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running_extreme(ctx, self, dim, True)


@converter(aten.cummin.default)
def cummin(ctx: ConversionContext, self: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _running_extreme(ctx, self, dim, False)
