"""Choosing between values: clamp, where, masked_fill."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.arithmetic import larger, smaller
from intarsia.convert.aten.comparison import truth
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, native, number, promoted
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
BOOL = ir.DataType.BOOL


@converter(aten.clamp.default, aten.clip.default)
def clamp(ctx: ConversionContext, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        return clamp_tensor(ctx, self, min, max)
    for bound in (min, max):
        if isinstance(bound, float) and math.isnan(bound):
            raise ConversionError("a bound that is NaN is not handled")
    (x,) = promoted(ctx, self)
    # A bound left out would be the largest finite number to ONNX, and cut infinities off.
    endless = math.inf if x.dtype in dtypes.FLOATS else None
    low = _bound(ctx, -math.inf if min is None and endless else min, x)
    high = _bound(ctx, endless if max is None else max, x)
    return narrowed(ctx, kernels.clip(x, low, high))


def _bound(ctx: ConversionContext, value: Any, x: Tensor) -> Tensor | None:
    return None if value is None else number(ctx, value, x.dtype)


@converter(aten.clamp_min.default)
def clamp_min(ctx: ConversionContext, self: Tensor, min: Any) -> Tensor:
    return clamp(ctx, self, min, None)


@converter(aten.clamp_max.default)
def clamp_max(ctx: ConversionContext, self: Tensor, max: Any) -> Tensor:
    return clamp(ctx, self, None, max)


@converter(aten.clamp.Tensor, aten.clip.Tensor)
def clamp_tensor(ctx: ConversionContext, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    x = self
    if min is not None:
        x = larger(ctx, *promoted(ctx, x, min))
    return x if max is None else smaller(ctx, *promoted(ctx, x, max))


@converter(aten.clamp_min.Tensor)
def clamp_min_tensor(ctx: ConversionContext, self: Tensor, min: Tensor) -> Tensor:
    return clamp_tensor(ctx, self, min, None)


@converter(aten.clamp_max.Tensor)
def clamp_max_tensor(ctx: ConversionContext, self: Tensor, max: Tensor) -> Tensor:
    return clamp_tensor(ctx, self, None, max)


@converter(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(ctx: ConversionContext, condition: Tensor, self: Any, other: Any) -> Tensor:
    a, b = ctx.promote(self, other)
    return choose(ctx, truth(condition), a, b)


@converter(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: ConversionContext, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    return choose(ctx, truth(mask), ctx.tensor(value, ctx.dtype), self)


def choose(ctx: ConversionContext, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Where, in a dtype that it has a kernel for."""
    dtype = ir.DataType.UINT8 if ctx.dtype == BOOL else native(ctx.dtype)
    return narrowed(ctx, F.where(condition, F.cast(a, dtype), F.cast(b, dtype)))
