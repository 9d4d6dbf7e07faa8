"""Softmax, its logarithm, and the logarithm of a sum of exponentials."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten.precision import axes_of, filled, is_empty, wide
from intarsia.convert.aten.reduce import holds_everywhere, holds_somewhere
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def _along(ctx: ConversionContext, x: Tensor, dim: int, layer: Any) -> Tensor:
    if is_empty(x):
        return filled(ctx)
    if x.ndim == 0:
        return F.cast(F.reshape(layer(wide(F.reshape(x, [1])), 0), []), ctx.dtype)
    return F.cast(layer(wide(x), dim), ctx.dtype)


@converter(aten.softmax.int, aten.special_softmax.default)
def softmax(ctx: ConversionContext, self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = F.cast(self, dtype) if dtype is not None else self
    return _along(ctx, x, dim, F.softmax)


@converter(aten._softmax.default)
def _softmax(ctx: ConversionContext, self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = F.cast(self, ctx.dtype) if half_to_float else self
    return _along(ctx, x, dim, F.softmax)


@converter(aten._safe_softmax.default)
def _safe_softmax(ctx: ConversionContext, self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax that makes zeros, not NaN, of a row of nothing but minus infinity."""
    x = F.cast(self, dtype) if dtype is not None else self

    def safe(x: Tensor, axis: int) -> Tensor:
        hidden = holds_everywhere(F.equal(x, -torch.inf), [axis], True)
        return F.where(hidden, 0.0, F.softmax(x, axis))

    return _along(ctx, x, dim, safe)


def _log_softmax_layer(x: Tensor, axis: int) -> Tensor:
    if x.dtype != ir.DataType.DOUBLE:
        return F.log_softmax(x, axis)
    # ONNX Runtime's kernel for float64 passes over a NaN.
    shifted = F.sub(x, F.reduce_max(x, [axis], keepdims=True))
    return F.sub(shifted, F.log(F.reduce_sum(F.exp(shifted), [axis], keepdims=True)))


@converter(aten.log_softmax.int, aten.special_log_softmax.default)
def log_softmax(ctx: ConversionContext, self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = F.cast(self, dtype) if dtype is not None else self
    return _along(ctx, wide(x, halves=True), dim, _log_softmax_layer)  # kernels for halves lose too much


@converter(aten._log_softmax.default)
def _log_softmax(ctx: ConversionContext, self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = F.cast(self, ctx.dtype) if half_to_float else self
    return _along(ctx, wide(x, halves=True), dim, _log_softmax_layer)


@converter(aten.logsumexp.default, aten.special_logsumexp.default)
def logsumexp(ctx: ConversionContext, self: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if is_empty(self):
        return filled(ctx, -torch.inf)
    x = wide(F.cast(self, ctx.dtype))
    if self.ndim == 0:
        return F.cast(x, ctx.dtype)
    axes = axes_of(dim, self.ndim)
    # By parts: the largest element may be infinite, and infinity less infinity is not a number.
    largest = F.reduce_max(x, axes)
    shift = F.where(F.isinf(largest), 0.0, largest)
    summed = F.reduce_sum(F.exp(F.sub(x, shift)), axes)
    # OpenVINO's exponential of a NaN is infinite.
    nans = holds_somewhere(F.isnan(x), axes, True)
    made = F.where(nans, math.nan, F.add(F.log(summed), shift))
    return F.cast(made if keepdim else F.squeeze(made, axes), ctx.dtype)
