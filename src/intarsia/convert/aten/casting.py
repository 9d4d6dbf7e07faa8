"""Conversions between dtypes, and operators that change nothing an engine can see."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.comparison import truth
from intarsia.convert.aten.creation import filled_like
from intarsia.convert.context import Context, narrowed, promoted
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
prims = torch.ops.prims


# The dtype asked for is the dtype of the result, which the context knows.
@converter(
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)
def to(
    ctx: Context,
    self: Tensor | None = None,
    a: Tensor | None = None,
    dtype: Any = None,
    other: Tensor | None = None,
    copy: bool = False,
) -> Tensor:
    x = a if self is None else self
    assert x is not None
    return truth(x) if ctx.dtype == ir.DataType.BOOL else F.cast(x, ctx.dtype)


@converter(aten.item.default, aten._local_scalar_dense.default)
def item(ctx: Context, self: Tensor) -> Tensor:
    """The only element as a number of the graph: a 0-d integer, or a 0-d float as wide as Python's."""
    if self.dtype == ir.DataType.BOOL:
        raise ConversionError("a tensor used as a Python bool is not handled")
    scalar = F.reshape(self, ()) if self.ndim else self
    return F.cast(scalar, ir.DataType.DOUBLE if self.dtype in dtypes.FLOATS else ir.DataType.INT64)


_BYTES = frozenset({ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8})


@converter(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(ctx: Context, self: Tensor, dtype: Any) -> Tensor:
    """The same bits read as another dtype: bytes can be computed, anything else needs a layer of its own."""
    if self.dtype == ctx.dtype:
        return self
    if self.dtype not in _BYTES or ctx.dtype not in _BYTES - {ir.DataType.BOOL}:
        raise ConversionError(
            f"the bits of {self.dtype.name} as {ctx.dtype.name} are not handled: opset 23 has no BitCast"
        )
    number = F.cast(self, ir.DataType.INT32)
    if self.dtype == ir.DataType.INT8:
        number = F.where(F.less(number, 0), F.add(number, 256), number)
    elif self.dtype == ir.DataType.UINT8:
        number = F.where(F.less(number, 128), number, F.sub(number, 256))
    return F.cast(number, ctx.dtype)


# Operators that change nothing an engine can see: copies, aliases, dropout outside training.


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
def same(ctx: Context, self: Tensor) -> Tensor:
    return self


@converter(prims.view_of.default)
def view_of(ctx: Context, a: Tensor) -> Tensor:
    return a


@converter(
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
def dropout(ctx: Context, input: Tensor, p: float, train: bool) -> Tensor:
    if train and p == 1:
        (x,) = promoted(ctx, input)
        return narrowed(ctx, F.mul(x, 0.0))  # all is dropped, and a NaN stays one
    _refuse_training(p, train)
    return input


@converter(aten.native_dropout.default)
def native_dropout(ctx: Context, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, ...]:
    _refuse_training(p, train is None or train)
    return input, filled_like(input, True, ir.DataType.BOOL)


def _refuse_training(p: float, train: bool) -> None:
    if train and p != 0:
        raise ConversionError(f"dropout of p={p} in training draws random numbers and is not handled")


@converter(aten.copy.default)
def copy(ctx: Context, self: Tensor, src: Tensor) -> Tensor:
    source = F.cast(src, ctx.dtype)
    if source.shape == self.shape and None not in self.shape:
        return source
    return kernels.expand(source, F.shape(self))
