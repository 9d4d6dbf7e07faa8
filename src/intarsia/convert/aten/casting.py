"""Conversions between dtypes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten.comparison import truth
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten, prims = torch.ops.aten, torch.ops.prims


def converted(ctx: ConversionContext, x: Tensor) -> Tensor:
    """`x` in the dtype of the result."""
    return truth(x) if ctx.dtype == ir.DataType.BOOL else F.cast(x, ctx.dtype)


# The dtype asked for is the dtype of the result, which the context knows.
@converter(aten.to.dtype, aten.to.dtype_layout, aten.to.device)
def to_dtype(ctx: ConversionContext, self: Tensor, dtype: Any = None, copy: bool = False) -> Tensor:
    return converted(ctx, self)


@converter(aten.to.other)
def to_other(ctx: ConversionContext, self: Tensor, other: Tensor, copy: bool = False) -> Tensor:
    return converted(ctx, self)


@converter(aten.type_as.default)
def type_as(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    return converted(ctx, self)


@converter(aten._to_copy.default)
def to_copy(ctx: ConversionContext, self: Tensor, *, dtype: Any = None) -> Tensor:
    return converted(ctx, self)


@converter(prims.convert_element_type.default)
def convert_element_type(ctx: ConversionContext, a: Tensor, dtype: Any) -> Tensor:
    return converted(ctx, a)


@converter(aten.item.default, aten._local_scalar_dense.default)
def item(ctx: ConversionContext, self: Tensor) -> Tensor:
    """The one element as a number of the graph: a 0-d integer, or a 0-d float as wide as Python's."""
    if self.dtype == ir.DataType.BOOL:
        raise ConversionError("the truth of a tensor as a Python bool is not handled")
    scalar = F.reshape(self, ()) if self.ndim else self
    return F.cast(scalar, ir.DataType.DOUBLE if self.dtype in dtypes.FLOATS else ir.DataType.INT64)


_BYTES = frozenset({ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8})


@converter(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(ctx: ConversionContext, self: Tensor, dtype: Any) -> Tensor:
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
