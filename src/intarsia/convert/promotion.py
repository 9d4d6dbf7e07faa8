"""The dtype an elementwise converter computes in: the result's own, or a wider one that engines have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.convert.context import ConversionContext
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
NARROW = frozenset({ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8, ir.DataType.UINT16})


def wide(dtype: ir.DataType) -> ir.DataType:
    """Where a formula of several layers is computed: torch too computes halves in float32."""
    return ir.DataType.FLOAT if dtype in HALVES else native(dtype)


def native(dtype: ir.DataType) -> ir.DataType:
    """Where a single layer is computed: as it is, where engines have kernels that are right.

    They hardly have any for bfloat16. For narrow integers some are missing and others saturate where
    torch wraps; in int32 they are there, and the cast back wraps.
    """
    if dtype == ir.DataType.BFLOAT16:
        return ir.DataType.FLOAT
    return ir.DataType.INT32 if dtype in NARROW else dtype


def promoted_wide(ctx: ConversionContext, *values: Any) -> tuple[Tensor, ...]:
    """Operands in the dtype of the result, widened; cast what is made of them back with `narrowed`."""
    return tuple(_through(ctx, value, wide(ctx.dtype)) for value in values)


def promoted(ctx: ConversionContext, *values: Any) -> tuple[Tensor, ...]:
    """Operands in the dtype of the result for one layer; cast what it makes back with `narrowed`."""
    dtype = native(ctx.dtype)
    # torch keeps a Python scalar in float32 beside a float16 tensor: 1e6 must not become infinity.
    if dtype == ir.DataType.FLOAT16 and any(_is_lost(value) for value in values):
        dtype = ir.DataType.FLOAT
    return tuple(_through(ctx, value, dtype) for value in values)


def number(ctx: ConversionContext, value: Any, dtype: ir.DataType) -> Tensor:
    """A Python number beside tensors of the result's dtype, to compute in `dtype`: -1 is 255 in uint8."""
    if ctx.dtype in NARROW:
        value = np.asarray(value).astype(dtypes.to_numpy(ctx.dtype))
    return F.constant(value, dtype)


def narrowed(ctx: ConversionContext, result: Tensor) -> Tensor:
    """What was computed, in the dtype of the result."""
    return F.cast(result, ctx.dtype)


def _through(ctx: ConversionContext, value: Any, dtype: ir.DataType) -> Tensor:
    if not isinstance(value, Tensor):
        return number(ctx, value, dtype)
    # A float32 beside a bfloat16 is rounded before it is computed with, unless it is 0-d.
    if value.dtype != ctx.dtype and (value.ndim or ctx.dtype in NARROW):
        value = F.cast(value, ctx.dtype)
    return F.cast(value, dtype)


def _is_lost(value: Any) -> bool:
    if isinstance(value, Tensor) or value == 0 or not np.isfinite(value):
        return False
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float16(value))
    return bool(abs(rounded - value) > abs(value) * 2.0**-10)
