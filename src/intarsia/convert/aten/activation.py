"""Activations, softmax and its relatives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import wide
from intarsia.convert.aten.reduce import holds_everywhere
from intarsia.convert.aten.unary import expm1, softplus
from intarsia.convert.context import Context, narrowed, number, promoted, promoted_wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.relu.default)
def relu(ctx: Context, self: Tensor) -> Tensor:
    if self.dtype in dtypes.INTEGERS:
        (x,) = promoted(ctx, self)
        return narrowed(ctx, kernels.clip(x, 0, None))
    return narrowed(ctx, F.relu(*promoted(ctx, self)))


@converter(aten.hardtanh.default)
def hardtanh(ctx: Context, self: Tensor, min_val: Any = -1, max_val: Any = 1) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, kernels.clip(x, number(ctx, min_val, x.dtype), number(ctx, max_val, x.dtype)))


@converter(aten.gelu.default)
def gelu(ctx: Context, self: Tensor, *, approximate: str = "none") -> Tensor:
    (x,) = promoted(ctx, self)
    if approximate == "tanh" and x.dtype == ir.DataType.DOUBLE:  # ONNX defines it with constants of 32 bits
        inside = F.mul(F.add(x, F.mul(F.mul(F.mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return narrowed(ctx, F.mul(F.mul(x, 0.5), F.add(F.tanh(inside), 1.0)))
    return narrowed(ctx, F.gelu(x, approximate=approximate))


@converter(aten.leaky_relu.default)
def leaky_relu(ctx: Context, self: Tensor, negative_slope: float = 0.01) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.leaky_relu(x, negative_slope))


@converter(aten.rrelu.default)
def rrelu(
    ctx: Context, self: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    if training:
        raise ConversionError("training=True draws random slopes and is not handled")
    return leaky_relu(ctx, self, (lower + upper) / 2)


@converter(aten.prelu.default, aten._prelu_kernel.default)
def prelu(ctx: Context, self: Tensor, weight: Tensor) -> Tensor:
    x, slope = promoted(ctx, self, weight)
    if weight.ndim == 1 and self.ndim != 1:
        # torch gives one slope to each channel, the second dimension.
        slope = F.reshape(slope, (-1,) + (1,) * (self.ndim - 2) if self.ndim else ())
    if weight.constant is not None and np.isfinite(weight.constant.astype(np.float64)).all():
        return narrowed(ctx, F.prelu(x, slope))
    # A slope that is not finite makes a NaN of zero, which the layer passes on.
    return narrowed(ctx, F.where(F.less(0.0, x), x, F.mul(x, slope)))


# Activations made of several layers: exponential units, shrinkage, gates.


@converter(aten.elu.default)
def elu(ctx: Context, self: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Tensor:
    if scale == 1 and input_scale == 1:
        (x,) = promoted(ctx, self)
        return narrowed(ctx, F.elu(x, float(alpha)))
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, _exponential(x, alpha * scale, scale, input_scale))


def _exponential(x: Tensor, negative: float, positive: float, inner: float) -> Tensor:
    """`positive * x` above zero, else `negative * (exp(inner * x) - 1)`."""
    above = F.mul(x, float(positive)) if positive != 1 else x
    below = F.mul(expm1(F.mul(x, float(inner)) if inner != 1 else x), float(negative))
    return F.where(F.greater(x, 0.0), above, below)


@converter(aten.softplus.default)
def scaled_softplus(ctx: Context, self: Tensor, beta: Any = 1, threshold: Any = 20) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    scaled = F.mul(x, float(beta)) if beta != 1 else x
    curve = softplus(scaled)
    if beta != 1:
        curve = F.div(curve, float(beta))
    if threshold >= 20 and x.dtype == ir.DataType.FLOAT:  # beyond 20 the curve is the line, in float32
        return narrowed(ctx, curve)
    return narrowed(ctx, F.where(F.greater(scaled, float(threshold)), x, curve))


@converter(aten.glu.default)
def glu(ctx: Context, self: Tensor, dim: int = -1) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    axis = dim % x.ndim
    value, gate = F.ops("Split", x, outputs=2, axis=axis, num_outputs=2)
    return narrowed(ctx, F.mul(value, F.sigmoid(gate)))


# Softmax and its logarithm.


def _along(ctx: Context, x: Tensor, dim: int, layer: Any) -> Tensor:
    if x.ndim == 0:
        return F.cast(F.reshape(layer(wide(F.reshape(x, [1])), 0), []), ctx.dtype)
    return F.cast(layer(wide(x), dim), ctx.dtype)


# The dtype asked for is the dtype of the result, which the context knows.
@converter(aten.softmax.int, aten.special_softmax.default, aten._softmax.default)
def softmax(ctx: Context, self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False) -> Tensor:
    return _along(ctx, F.cast(self, ctx.dtype), dim, F.softmax)


@converter(aten._safe_softmax.default)
def safe_softmax(ctx: Context, self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax that makes zeros, not NaN, of a row of nothing but minus infinity."""

    def safe(x: Tensor, axis: int) -> Tensor:
        hidden = holds_everywhere(F.equal(x, -torch.inf), [axis], True)
        return F.where(hidden, 0.0, F.softmax(x, axis))

    return _along(ctx, F.cast(self, ctx.dtype), dim, safe)


def _log_softmax_layer(x: Tensor, axis: int) -> Tensor:
    if x.dtype != ir.DataType.DOUBLE:
        return F.log_softmax(x, axis)
    # ONNX Runtime's kernel for float64 passes over a NaN.
    shifted = F.sub(x, F.reduce_max(x, [axis], keepdims=True))
    return F.sub(shifted, F.log(F.reduce_sum(F.exp(shifted), [axis], keepdims=True)))


@converter(aten.log_softmax.int, aten.special_log_softmax.default, aten._log_softmax.default)
def log_softmax(
    ctx: Context, self: Tensor, dim: int, dtype: Any = None, half_to_float: bool = False
) -> Tensor:
    x = wide(F.cast(self, ctx.dtype), halves=True)  # kernels for halves lose too much
    return _along(ctx, x, dim, _log_softmax_layer)
