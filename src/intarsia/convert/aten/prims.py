"""Reductions of torch's primitive operators, which some decompositions end in."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

prims = torch.ops.prims


def _axes(dims: Any, x: Tensor) -> list[int] | None:
    if dims is None:
        return None
    if not dims:
        raise ConversionError("dims=() is not handled")
    return [dim % x.ndim for dim in dims]


def _wide(x: Tensor, dtype: ir.DataType) -> Tensor:
    # Halves are summed in float32 and rounded once, as torch does.
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return F.cast(x, ir.DataType.FLOAT if dtype in halves else dtype)


@converter(prims.sum.default)
def prims_sum(ctx: ConversionContext, inp: Tensor, dims: Any, *, output_dtype: Any = None) -> Tensor:
    made = F.reduce_sum(_wide(inp, ctx.dtype), _axes(dims, inp), keepdims=False)
    return F.cast(made, ctx.dtype)


@converter(prims.prod.default)
def prims_prod(ctx: ConversionContext, inp: Tensor, dims: Any, *, output_dtype: Any = None) -> Tensor:
    made = F.reduce_prod(_wide(inp, ctx.dtype), _axes(dims, inp), keepdims=False)
    return F.cast(made, ctx.dtype)
