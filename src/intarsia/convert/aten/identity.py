"""Operators that change nothing an engine can see: copies, aliases, dropout outside training."""

from __future__ import annotations

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.creation import filled_like
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten, prims = torch.ops.aten, torch.ops.prims


@converter(
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.conj.default,
    aten.conj_physical.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def same(ctx: ConversionContext, self: Tensor) -> Tensor:
    return self


@converter(prims.view_of.default)
def view_of(ctx: ConversionContext, a: Tensor) -> Tensor:
    return a


@converter(
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
def dropout(ctx: ConversionContext, input: Tensor, p: float, train: bool) -> Tensor:
    if train and p == 1:
        (x,) = promoted(ctx, input)
        return narrowed(ctx, F.mul(x, 0.0))  # all is dropped, and a NaN stays one
    _refuse_training(p, train)
    return input


@converter(aten.native_dropout.default)
def native_dropout(ctx: ConversionContext, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, ...]:
    _refuse_training(p, train is None or train)
    return input, filled_like(input, True, ir.DataType.BOOL)


def _refuse_training(p: float, train: bool) -> None:
    if train and p != 0:
        raise ConversionError(f"dropout of p={p} in training draws random numbers and is not handled")


@converter(aten.copy.default)
def copy(ctx: ConversionContext, self: Tensor, src: Tensor) -> Tensor:
    source = F.cast(src, ctx.dtype)
    if source.shape == self.shape and None not in self.shape:
        return source
    return kernels.expand(source, F.shape(self))
