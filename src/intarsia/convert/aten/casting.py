"""Conversions between dtypes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten, prims = torch.ops.aten, torch.ops.prims


# The dtype asked for is the dtype of the result, which the context knows.
@converter(aten.to.dtype, aten.to.dtype_layout, aten.to.device)
def to_dtype(ctx: ConversionContext, self: Tensor, dtype: Any = None, copy: bool = False) -> Tensor:
    return F.cast(self, ctx.dtype)


@converter(aten.to.other)
def to_other(ctx: ConversionContext, self: Tensor, other: Tensor, copy: bool = False) -> Tensor:
    return F.cast(self, ctx.dtype)


@converter(aten.type_as.default)
def type_as(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    return F.cast(self, ctx.dtype)


@converter(aten._to_copy.default)
def to_copy(ctx: ConversionContext, self: Tensor, *, dtype: Any = None) -> Tensor:
    return F.cast(self, ctx.dtype)


@converter(prims.convert_element_type.default)
def convert_element_type(ctx: ConversionContext, a: Tensor, dtype: Any) -> Tensor:
    return F.cast(a, ctx.dtype)


@converter(aten.item.default, aten._local_scalar_dense.default)
def item(ctx: ConversionContext, self: Tensor) -> Tensor:
    """The one element as a number of the graph: a 0-d integer, or a 0-d float."""
    if self.dtype == ir.DataType.BOOL:
        raise ConversionError("the truth of a tensor as a Python bool is not handled")
    scalar = F.reshape(self, ()) if self.ndim else self
    return F.cast(scalar, ir.DataType.FLOAT if self.dtype in dtypes.FLOATS else ir.DataType.INT64)
