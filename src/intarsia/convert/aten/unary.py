"""Functions of one tensor, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted, promoted_wide, wide
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
Formula = Callable[[Tensor], Tensor]

# One layer each; integers and booleans become floats first, as in torch.
LAYERS: dict[Any, Callable[[Any], Tensor]] = {
    aten.acos.default: F.acos,
    aten.acosh.default: F.acosh,
    aten.asin.default: F.asin,
    aten.asinh.default: F.asinh,
    aten.atan.default: F.atan,
    aten.atanh.default: F.atanh,
    aten.cos.default: F.cos,
    aten.cosh.default: F.cosh,
    aten.erf.default: F.erf,
    aten.special_erf.default: F.erf,
    aten.exp.default: F.exp,
    aten.log.default: F.log,
    aten.reciprocal.default: F.reciprocal,
    aten.sigmoid.default: F.sigmoid,
    aten.special_expit.default: F.sigmoid,
    aten.sin.default: F.sin,
    aten.sinh.default: F.sinh,
    aten.sqrt.default: F.sqrt,
    aten.tan.default: F.tan,
    aten.tanh.default: F.tanh,
}


def expm1(x: Tensor) -> Tensor:
    """`exp(x) - 1` that keeps its digits near zero: tanh(x/2) = (e^x - 1) / (e^x + 1)."""
    return F.mul(F.tanh(F.mul(x, 0.5)), F.add(F.exp(x), 1.0))


def log1p(x: Tensor) -> Tensor:
    """`log(1 + x)` that keeps its digits near zero: log(1 + x) = 2 atanh(x / (2 + x))."""
    near = F.mul(F.atanh(F.div(x, F.add(x, 2.0))), 2.0)
    return F.where(F.less(F.abs(x), 0.5), near, F.log(F.add(x, 1.0)))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`; far below zero by its series, where OpenVINO's layer even turns negative."""
    if x.dtype != ir.DataType.FLOAT:
        return F.softplus(x)  # the series has the digits of float32
    small = F.exp(x)
    series = F.mul(small, F.sub(1.0, F.mul(small, 0.5)))
    return F.where(F.less(x, -8.0), series, F.softplus(x))


def trunc(x: Tensor) -> Tensor:
    """`x` rounded towards zero."""
    return F.where(F.less(x, 0.0), F.ceil(x), F.floor(x))


def sinc(x: Tensor) -> Tensor:
    """`sin(pi x) / (pi x)`, one at zero."""
    angle = F.mul(x, math.pi)
    return F.where(F.equal(x, 0.0), 1.0, F.div(F.sin(angle), angle))


# Several layers each, so halves are computed in float32.
FORMULAS: dict[Any, Formula] = {
    aten.deg2rad.default: lambda x: F.mul(x, math.pi / 180),
    aten.exp2.default: lambda x: F.pow(F.constant(2.0, x.dtype), x),
    aten.special_exp2.default: lambda x: F.pow(F.constant(2.0, x.dtype), x),
    aten.expm1.default: expm1,
    aten.special_expm1.default: expm1,
    aten.log10.default: lambda x: F.mul(F.log(x), 1 / math.log(10)),
    aten.log1p.default: log1p,
    aten.special_log1p.default: log1p,
    aten.log2.default: lambda x: F.mul(F.log(x), 1 / math.log(2)),
    aten.rad2deg.default: lambda x: F.mul(x, 180 / math.pi),
    aten.rsqrt.default: lambda x: F.reciprocal(F.sqrt(x)),
    aten.sinc.default: sinc,
    aten.special_sinc.default: sinc,
}

# Nothing to do to integers.
ROUNDINGS: dict[Any, Callable[[Any], Tensor]] = {
    aten.ceil.default: F.ceil,
    aten.floor.default: F.floor,
    aten.round.default: F.round,
    aten.special_round.default: F.round,
    aten.trunc.default: trunc,
    aten.fix.default: trunc,
}


def _layer(target: Any, functional: Callable[[Any], Tensor]) -> None:
    def layer(ctx: ConversionContext, self: Tensor) -> Tensor:
        return narrowed(ctx, functional(*promoted(ctx, self)))

    converter(target)(_named(layer, target))


def _formula(target: Any, formula: Formula) -> None:
    def layers(ctx: ConversionContext, self: Tensor) -> Tensor:
        return narrowed(ctx, formula(*promoted_wide(ctx, self)))

    converter(target)(_named(layers, target))


def _rounding(target: Any, functional: Callable[[Any], Tensor]) -> None:
    def rounding(ctx: ConversionContext, self: Tensor) -> Tensor:
        if self.dtype not in dtypes.FLOATS:
            return self
        return narrowed(ctx, functional(*promoted(ctx, self)))

    converter(target)(_named(rounding, target))


def _named(function: Callable[..., Tensor], target: Any) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = str(target._opname)
    return function


for _target, _function in LAYERS.items():
    _layer(_target, _function)
for _target, _function in FORMULAS.items():
    _formula(_target, _function)
for _target, _function in ROUNDINGS.items():
    _rounding(_target, _function)


@converter(aten.abs.default, aten.absolute.default)
def abs(ctx: ConversionContext, self: Tensor) -> Tensor:
    return narrowed(ctx, F.abs(*promoted(ctx, self)))


@converter(aten.neg.default, aten.negative.default)
def neg(ctx: ConversionContext, self: Tensor) -> Tensor:
    return narrowed(ctx, F.neg(*promoted(ctx, self)))


@converter(aten.sign.default, aten.sgn.default)
def sign(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype == ir.DataType.BOOL:
        return self
    if self.dtype not in dtypes.FLOATS:
        return kernels.sign(self)
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.where(F.isnan(x), 0.0, F.sign(x)))  # torch gives a NaN no sign


@converter(aten.signbit.default)
def signbit(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype == ir.DataType.BOOL or self.dtype in dtypes.UNSIGNED:
        return F.logical_not(F.equal(self, self))
    return is_negative(F.cast(self, wide(self.dtype)))


def is_negative(x: Tensor) -> Tensor:
    """Whether the sign is minus, which a zero can have too."""
    if x.dtype not in dtypes.FLOATS:
        return F.less(x, 0)
    return F.logical_or(F.less(x, 0.0), F.less(F.reciprocal(x), 0.0))


@converter(aten.square.default)
def square(ctx: ConversionContext, self: Tensor) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.mul(x, x))


@converter(aten.frac.default)
def frac(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.sub(self, self)
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, F.sub(x, trunc(x)))


@converter(aten.round.decimals)
def round_decimals(ctx: ConversionContext, self: Tensor, decimals: int = 0) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return self
    (x,) = promoted_wide(ctx, self)
    scale = float(10 ** max(decimals, -decimals))
    if decimals < 0:
        return narrowed(ctx, F.mul(F.round(F.div(x, scale)), scale))
    return narrowed(ctx, F.div(F.round(F.mul(x, scale)), scale))


@converter(aten.logit.default, aten.special_logit.default)
def logit(ctx: ConversionContext, self: Tensor, eps: float | None = None) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    if eps is not None:
        low, high = F.constant(eps, x.dtype), F.constant(1.0 - eps, x.dtype)
        x = F.where(F.less(x, low), low, F.where(F.less(high, x), high, x))  # a NaN stays one
    return narrowed(ctx, F.log(F.div(x, F.sub(1.0, x))))


@converter(aten.nan_to_num.default)
def nan_to_num(
    ctx: ConversionContext,
    self: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return self
    limits = torch.finfo(ctx.torch_dtype)
    (x,) = promoted_wide(ctx, self)
    x = F.where(F.isnan(x), 0.0 if nan is None else nan, x)
    x = F.where(F.equal(x, math.inf), limits.max if posinf is None else posinf, x)
    x = F.where(F.equal(x, -math.inf), limits.min if neginf is None else neginf, x)
    return narrowed(ctx, x)
