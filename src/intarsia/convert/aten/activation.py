"""Activations of one layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.unary import softplus
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, number, promoted, promoted_wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.relu.default)
def relu(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype in dtypes.INTEGERS:
        (x,) = promoted(ctx, self)
        return narrowed(ctx, kernels.clip(x, 0, None))
    return narrowed(ctx, F.relu(*promoted(ctx, self)))


@converter(aten.relu6.default)
def relu6(ctx: ConversionContext, self: Tensor) -> Tensor:
    return hardtanh(ctx, self, 0, 6)


@converter(aten.hardtanh.default)
def hardtanh(ctx: ConversionContext, self: Tensor, min_val: Any = -1, max_val: Any = 1) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, kernels.clip(x, number(ctx, min_val, x.dtype), number(ctx, max_val, x.dtype)))


@converter(aten.gelu.default)
def gelu(ctx: ConversionContext, self: Tensor, *, approximate: str = "none") -> Tensor:
    (x,) = promoted(ctx, self)
    if approximate == "tanh" and x.dtype == ir.DataType.DOUBLE:  # ONNX defines it with constants of 32 bits
        inside = F.mul(F.add(x, F.mul(F.mul(F.mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return narrowed(ctx, F.mul(F.mul(x, 0.5), F.add(F.tanh(inside), 1.0)))
    return narrowed(ctx, F.gelu(x, approximate=approximate))


@converter(aten.silu.default)
def silu(ctx: ConversionContext, self: Tensor) -> Tensor:
    return narrowed(ctx, F.silu(*promoted_wide(ctx, self)))


@converter(aten.mish.default)
def mish(ctx: ConversionContext, self: Tensor) -> Tensor:
    return narrowed(ctx, F.mish(*promoted(ctx, self)))


@converter(aten.leaky_relu.default)
def leaky_relu(ctx: ConversionContext, self: Tensor, negative_slope: float = 0.01) -> Tensor:
    (x,) = promoted(ctx, self)
    return narrowed(ctx, F.leaky_relu(x, negative_slope))


@converter(aten.rrelu.default)
def rrelu(
    ctx: ConversionContext, self: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    if training:
        raise ConversionError("training=True draws random slopes and is not handled")
    return leaky_relu(ctx, self, (lower + upper) / 2)


@converter(aten.prelu.default, aten._prelu_kernel.default)
def prelu(ctx: ConversionContext, self: Tensor, weight: Tensor) -> Tensor:
    x, slope = promoted(ctx, self, weight)
    if weight.ndim == 1 and self.ndim != 1:
        # torch gives one slope to each channel, the second dimension.
        slope = F.reshape(slope, (-1,) + (1,) * (self.ndim - 2) if self.ndim else ())
    if weight.constant is not None and np.isfinite(weight.constant.astype(np.float64)).all():
        return narrowed(ctx, F.prelu(x, slope))
    # A slope that is not finite makes a NaN of zero, which the layer passes on.
    return narrowed(ctx, F.where(F.less(0.0, x), x, F.mul(x, slope)))


@converter(aten.hardsigmoid.default)
def hardsigmoid(ctx: ConversionContext, self: Tensor) -> Tensor:
    (x,) = promoted_wide(ctx, self)  # a sixth is not the same in halves
    return narrowed(ctx, F.hardsigmoid(x))


@converter(aten.hardswish.default)
def hardswish(ctx: ConversionContext, self: Tensor) -> Tensor:
    return narrowed(ctx, F.hardswish(*promoted(ctx, self)))


@converter(aten.log_sigmoid.default)
def log_sigmoid(ctx: ConversionContext, self: Tensor) -> Tensor:
    (x,) = promoted_wide(ctx, self)
    return narrowed(ctx, F.sub(0.0, softplus(F.neg(x))))  # of infinity 0.0, which `neg` would make -0.0


@converter(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ctx: ConversionContext, self: Tensor) -> tuple[Tensor, None]:
    # The second result is a buffer for the backward pass; inference does not read it.
    return log_sigmoid(ctx, self), None
