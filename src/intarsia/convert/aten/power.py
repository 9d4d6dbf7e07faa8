"""Powers."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted, promoted_wide, wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: ConversionContext, self: Tensor, exponent: Any) -> Tensor:
    if isinstance(exponent, Tensor):
        return power(ctx, self, exponent)
    if ctx.dtype in dtypes.INTEGERS:
        (x,) = promoted(ctx, self)
        return narrowed(ctx, _integer_power(x, int(exponent)))
    if ctx.dtype == ir.DataType.BOOL:
        raise ConversionError("a power of booleans is not handled")
    if exponent == 1:
        return ctx.promote(self)[0]
    if exponent == 0.5 and ctx.dtype != ir.DataType.FLOAT16:
        return narrowed(ctx, F.sqrt(*promoted(ctx, self)))
    if exponent == -1:
        return narrowed(ctx, F.reciprocal(*promoted(ctx, self)))
    (x,) = promoted_wide(ctx, self)
    if exponent in (0.5, -0.5) and ctx.dtype == ir.DataType.FLOAT16:
        x = _as_a_powers_base(x)
    if exponent == 0.5:
        return narrowed(ctx, F.sqrt(x))
    if exponent == -0.5:
        return narrowed(ctx, F.reciprocal(F.sqrt(x)))
    if exponent == -2:
        return narrowed(ctx, F.reciprocal(F.mul(x, x)))
    return narrowed(ctx, F.pow(x, F.constant(float(exponent), x.dtype)))


def _as_a_powers_base(x: Tensor) -> Tensor:
    """PyTorch takes roots of float16 as powers, which see no sign of an infinity or a zero."""
    infinity = F.constant(float("inf"), x.dtype)
    x = F.where(F.equal(x, F.constant(float("-inf"), x.dtype)), infinity, x)
    zero = F.constant(0.0, x.dtype)
    return F.where(F.equal(x, zero), zero, x)


@converter(aten.pow.Tensor_Tensor)
def power(ctx: ConversionContext, self: Any, exponent: Any) -> Tensor:
    if ctx.dtype == ir.DataType.BOOL:
        raise ConversionError("a power of booleans is not handled")
    if ctx.dtype not in dtypes.FLOATS:
        a, b = (F.cast(x, ir.DataType.INT64) for x in promoted(ctx, self, exponent))
        return narrowed(ctx, _power_of_integers(a, b, ctx.dtype))
    a, b = promoted_wide(ctx, self, exponent)
    return narrowed(ctx, F.pow(a, b))


@converter(aten.pow.Scalar)
def scalar_power(ctx: ConversionContext, self: Any, exponent: Tensor) -> Tensor:
    return power(ctx, self, exponent)


@converter(aten.ldexp.Tensor)
def ldexp(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    (a,) = promoted_wide(ctx, self)
    own = other.dtype if other.dtype in dtypes.FLOATS else ir.DataType.FLOAT
    places = F.cast(other, wide(own))
    factor = F.cast(F.pow(F.constant(2.0, places.dtype), places), own)  # torch rounds it to its own dtype
    return narrowed(ctx, F.mul(a, F.cast(factor, a.dtype)))


def _integer_power(x: Tensor, exponent: int) -> Tensor:
    """By repeated squaring: exact, and wraps where torch wraps."""
    if exponent < 0:
        raise ConversionError(f"exponent={exponent} of an integer is not handled")
    if exponent == 0:
        return F.sub(F.add(x, 1), x)
    result: Tensor | None = None
    while exponent:
        if exponent & 1:
            result = x if result is None else F.mul(result, x)
        exponent >>= 1
        if exponent:
            x = F.mul(x, x)
    assert result is not None
    return result


def _power_of_integers(base: Tensor, exponent: Tensor, dtype: ir.DataType) -> Tensor:
    """One square for every bit of the exponent: exact, and wraps where torch wraps.

    Engines take a power of integers through floats, which loses digits. All is done in int64: an engine
    without one would lose digits here too, and says so at the first constant. Of a negative exponent
    torch makes zero, unless the base is one or minus one.
    """
    bits = dtypes.to_numpy(dtype).itemsize * 8
    result = _factor(base, exponent, 1)
    odd, square = result, base
    for bit in range(1, bits if dtype in dtypes.UNSIGNED else bits - 1):
        square = F.mul(square, square)
        result = F.mul(result, _factor(square, exponent, 1 << bit))
    if dtype in dtypes.UNSIGNED:
        return result
    unit = F.logical_or(F.equal(base, 1), F.equal(base, -1))
    negative = _has(exponent, -(2**63))
    return F.where(negative, F.where(unit, odd, 0), result)


def _factor(power: Tensor, exponent: Tensor, bit: int) -> Tensor:
    """`power` where the exponent has this bit, else one."""
    return F.where(_has(exponent, bit), power, 1)


def _has(exponent: Tensor, bit: int) -> Tensor:
    return F.cast(F.bitwise_and(exponent, bit), ir.DataType.BOOL)
