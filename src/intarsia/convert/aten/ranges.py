"""Ranges and patterns of indices: arange, linspace, identity matrices, triangles."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.aten.creation import literal
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
INT64 = ir.DataType.INT64


@converter(aten.arange.default)
def arange(ctx: ConversionContext, end: Any, *, dtype: Any = None) -> Tensor:
    return arange_step(ctx, 0, end)


@converter(aten.arange.start)
def arange_start(ctx: ConversionContext, start: Any, end: Any, *, dtype: Any = None) -> Tensor:
    return arange_step(ctx, start, end)


@converter(aten.arange.start_step)
def arange_step(ctx: ConversionContext, start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Tensor:
    if not any(isinstance(bound, Tensor) for bound in (start, end, step)):
        return literal(torch.arange(start, end, step, dtype=ctx.torch_dtype))
    # A whole number written as a float makes the same steps.
    start, end, step = (int(x) if isinstance(x, float) and x.is_integer() else x for x in (start, end, step))
    for bound in (start, end, step):
        if isinstance(bound, float) or (isinstance(bound, Tensor) and bound.dtype != INT64):
            raise ConversionError(
                f"a range from {start} to {end} by {step}, not all integers, is not handled"
            )
    return F.cast(F.arange(start, end, step, INT64), ctx.dtype)


@converter(aten.linspace.default)
def linspace(ctx: ConversionContext, start: Any, end: Any, steps: Any, *, dtype: Any = None) -> Tensor:
    _refuse_dynamic(start=start, end=end, steps=steps)
    return literal(torch.linspace(start, end, steps, dtype=ctx.torch_dtype))


@converter(aten.logspace.default)
def logspace(
    ctx: ConversionContext, start: Any, end: Any, steps: Any, base: float = 10.0, *, dtype: Any = None
) -> Tensor:
    _refuse_dynamic(start=start, end=end, steps=steps)
    return literal(torch.logspace(start, end, steps, base, dtype=ctx.torch_dtype))


@converter(aten.tril_indices.default)
def tril_indices(ctx: ConversionContext, row: Any, col: Any, offset: int = 0, *, dtype: Any = None) -> Tensor:
    _refuse_dynamic(row=row, col=col)
    return literal(torch.tril_indices(row, col, offset, dtype=ctx.torch_dtype))


@converter(aten.triu_indices.default)
def triu_indices(ctx: ConversionContext, row: Any, col: Any, offset: int = 0, *, dtype: Any = None) -> Tensor:
    _refuse_dynamic(row=row, col=col)
    return literal(torch.triu_indices(row, col, offset, dtype=ctx.torch_dtype))


def _refuse_dynamic(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor):
            raise ConversionError(f"{name} known only at run time is not handled")


@converter(aten.eye.default)
def eye(ctx: ConversionContext, n: Any, *, dtype: Any = None) -> Tensor:
    return eye_m(ctx, n, n)


@converter(aten.eye.m)
def eye_m(ctx: ConversionContext, n: Any, m: Any, *, dtype: Any = None) -> Tensor:
    if not isinstance(n, Tensor) and not isinstance(m, Tensor):
        return literal(torch.eye(n, m, dtype=ctx.torch_dtype))
    rows, columns = F.arange(0, n, 1, INT64), F.arange(0, m, 1, INT64)
    return F.cast(F.equal(F.unsqueeze(rows, [1]), F.unsqueeze(columns, [0])), ctx.dtype)
