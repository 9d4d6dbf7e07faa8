"""Sums, differences, products and what is made of them."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.unary import is_negative, softplus
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted, promoted_wide
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
BOOL = ir.DataType.BOOL


def _is_one(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == 1


@converter(aten.add.Tensor, aten.add.Scalar)
def add(ctx: ConversionContext, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    if ctx.dtype == BOOL:
        a, b = ctx.promote(self, other)
        return F.logical_or(a, b) if _is_one(alpha) else F.logical_or(a, F.logical_and(b, bool(alpha)))
    if _is_one(alpha):
        a, b = promoted(ctx, self, other)
        return narrowed(ctx, F.add(a, b))
    a, b, scale = promoted(ctx, self, other, alpha)  # torch rounds the product, too
    return narrowed(ctx, F.add(a, F.mul(b, scale)))


@converter(aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar)
def sub(ctx: ConversionContext, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    if _is_one(alpha):
        a, b = promoted(ctx, self, other)
        return narrowed(ctx, F.sub(a, b))
    a, b, scale = promoted(ctx, self, other, alpha)
    return narrowed(ctx, F.sub(a, F.mul(b, scale)))


@converter(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: ConversionContext, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    return sub(ctx, other, self, alpha)


@converter(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar)
def mul(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    if ctx.dtype == BOOL:
        a, b = ctx.promote(self, other)
        return F.logical_and(a, b)
    a, b = promoted(ctx, self, other)
    return narrowed(ctx, F.mul(a, b))


@converter(aten.addcmul.default)
def addcmul(ctx: ConversionContext, self: Tensor, tensor1: Any, tensor2: Any, value: Any = 1) -> Tensor:
    x, a, b, scale = promoted_wide(ctx, self, tensor1, tensor2, value)
    product = F.mul(a, b) if _is_one(value) else F.mul(F.mul(scale, a), b)
    return narrowed(ctx, F.add(x, product))


@converter(aten.addcdiv.default)
def addcdiv(ctx: ConversionContext, self: Tensor, tensor1: Any, tensor2: Any, value: Any = 1) -> Tensor:
    x, a, b, scale = promoted_wide(ctx, self, tensor1, tensor2, value)
    quotient = F.div(a, b) if _is_one(value) else F.div(F.mul(scale, a), b)
    return narrowed(ctx, F.add(x, quotient))


@converter(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: ConversionContext, self: Tensor, end: Tensor, weight: Any) -> Tensor:
    a, b, w = promoted_wide(ctx, self, end, weight)
    span = F.sub(b, a)
    near, far = F.add(a, F.mul(w, span)), F.sub(b, F.mul(span, F.sub(1.0, w)))
    # torch starts at the nearer end, so that both ends are met exactly.
    return narrowed(ctx, F.where(F.less(F.abs(w), 0.5), near, far))


@converter(aten.maximum.default, aten.max.other)
def maximum(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    return larger(ctx, *promoted(ctx, self, other))


@converter(aten.minimum.default, aten.min.other)
def minimum(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    return smaller(ctx, *promoted(ctx, self, other))


@converter(aten.fmax.default)
def fmax(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = _without_nan(*promoted(ctx, self, other))
    return larger(ctx, a, b)


@converter(aten.fmin.default)
def fmin(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = _without_nan(*promoted(ctx, self, other))
    return smaller(ctx, a, b)


def larger(ctx: ConversionContext, a: Tensor, b: Tensor) -> Tensor:
    return F.logical_or(a, b) if ctx.dtype == BOOL else narrowed(ctx, kernels.maximum(a, b))


def smaller(ctx: ConversionContext, a: Tensor, b: Tensor) -> Tensor:
    return F.logical_and(a, b) if ctx.dtype == BOOL else narrowed(ctx, kernels.minimum(a, b))


def _without_nan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.dtype not in dtypes.FLOATS:
        return a, b
    return F.where(F.isnan(a), b, a), F.where(F.isnan(b), a, b)


@converter(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    size = F.abs(a)
    return narrowed(ctx, F.where(is_negative(b), F.neg(size), size))


@converter(aten.hypot.default)
def hypot(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    # Divided by the larger one first: squares of large numbers are infinite, of small ones zero.
    high, low = _ordered(*(F.abs(value) for value in promoted_wide(ctx, self, other)))
    ratio = F.where(F.equal(low, high), 1.0, F.div(low, high))
    length = F.mul(high, F.sqrt(F.add(F.mul(ratio, ratio), 1.0)))
    infinite = F.logical_or(F.equal(high, math.inf), F.equal(low, math.inf))  # even beside a NaN
    return narrowed(ctx, F.where(infinite, math.inf, length))


def _ordered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The larger and the smaller, both of them kept if one is NaN."""
    swap = F.less(a, b)
    return F.where(swap, b, a), F.where(swap, a, b)


@converter(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, aten.special_xlogy.default)
def xlogy(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    x, y = promoted_wide(ctx, self, other)
    product = F.mul(x, F.log(y))
    nothing = F.logical_and(F.equal(x, 0.0), F.logical_not(F.isnan(y)))
    return narrowed(ctx, F.where(nothing, 0.0, product))


@converter(aten.heaviside.default)
def heaviside(ctx: ConversionContext, self: Tensor, values: Tensor) -> Tensor:
    if ctx.dtype == BOOL:
        return F.logical_or(self, values)
    x, at_zero = promoted_wide(ctx, self, values)
    step = F.cast(F.less(F.constant(0, x.dtype), x), x.dtype)
    return narrowed(ctx, F.where(F.equal(x, 0), at_zero, step))


@converter(aten.logaddexp.default)
def logaddexp(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    high, low = _ordered(*promoted_wide(ctx, self, other))
    gap = F.where(F.equal(high, low), 0.0, F.sub(low, high))  # equal infinities have no difference
    return narrowed(ctx, F.add(high, softplus(gap)))
