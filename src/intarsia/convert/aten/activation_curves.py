"""Activations made of several layers: exponential units, shrinkage, gates."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten.unary import expm1, softplus
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, number, promoted, promoted_wide
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@converter(aten.elu.default)
def elu(ctx: ConversionContext, self: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Tensor:
    if scale == 1 and input_scale == 1:
        (x,) = promoted(ctx, self)
        return narrowed(ctx, F.elu(x, float(alpha)))
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, _exponential(x, alpha * scale, scale, input_scale))


@converter(aten.selu.default)
def selu(ctx: ConversionContext, self: Tensor) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, _exponential(x, SELU_ALPHA * SELU_SCALE, SELU_SCALE, 1))


@converter(aten.celu.default)
def celu(ctx: ConversionContext, self: Tensor, alpha: Any = 1.0) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, _exponential(x, alpha, 1, 1 / alpha))


def _exponential(x: Tensor, negative: float, positive: float, inner: float) -> Tensor:
    """`positive * x` above zero, else `negative * (exp(inner * x) - 1)`."""
    above = F.mul(x, float(positive)) if positive != 1 else x
    below = F.mul(expm1(F.mul(x, float(inner)) if inner != 1 else x), float(negative))
    return F.where(F.greater(x, 0.0), above, below)


@converter(aten.softplus.default)
def scaled_softplus(ctx: ConversionContext, self: Tensor, beta: Any = 1, threshold: Any = 20) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    scaled = F.mul(x, float(beta)) if beta != 1 else x
    curve = softplus(scaled)
    if beta != 1:
        curve = F.div(curve, float(beta))
    if threshold >= 20 and x.dtype == ir.DataType.FLOAT:  # beyond 20 the curve is the line, in float32
        return narrowed(ctx, curve)
    return narrowed(ctx, F.where(F.greater(scaled, float(threshold)), x, curve))


@converter(aten.softshrink.default)
def softshrink(ctx: ConversionContext, self: Tensor, lambd: Any = 0.5) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    bound = float(lambd)
    outside = F.where(F.greater(x, bound), F.sub(x, bound), F.mul(x, 0.0))
    return narrowed(ctx, F.where(F.less(x, -bound), F.add(x, bound), outside))


@converter(aten.hardshrink.default)
def hardshrink(ctx: ConversionContext, self: Tensor, lambd: Any = 0.5) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.where(F.less_equal(F.abs(x), float(lambd)), 0.0, x))


@converter(aten.threshold.default)
def threshold(ctx: ConversionContext, self: Tensor, threshold: Any, value: Any) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(
        ctx, F.where(F.less_equal(x, number(ctx, threshold, x.dtype)), number(ctx, value, x.dtype), x)
    )


@converter(aten.glu.default)
def glu(ctx: ConversionContext, self: Tensor, dim: int = -1) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    axis = dim % x.ndim
    value, gate = F.ops("Split", x, outputs=2, axis=axis, num_outputs=2)
    return narrowed(ctx, F.mul(value, F.sigmoid(gate)))
