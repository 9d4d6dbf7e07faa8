"""Arithmetic of two tensors: sums, products, quotients, remainders, powers, atan2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import zero_unless
from intarsia.convert.aten.unary import is_negative, trunc
from intarsia.convert.context import Context, narrowed, promoted, promoted_wide, wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
prims = torch.ops.prims
BOOL = ir.DataType.BOOL


def _is_one(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == 1


@converter(aten.add.Tensor, aten.add.Scalar)
def add(ctx: Context, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    if ctx.dtype == BOOL:
        a, b = ctx.promote(self, other)
        return F.logical_or(a, b) if _is_one(alpha) else F.logical_or(a, F.logical_and(b, bool(alpha)))
    if _is_one(alpha):
        a, b = promoted(ctx, self, other)
        return narrowed(ctx, F.add(a, b))
    a, b, scale = promoted(ctx, self, other, alpha)  # torch rounds the product, too
    return narrowed(ctx, F.add(a, F.mul(b, scale)))


@converter(aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar)
def sub(ctx: Context, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    if _is_one(alpha):
        a, b = promoted(ctx, self, other)
        return narrowed(ctx, F.sub(a, b))
    a, b, scale = promoted(ctx, self, other, alpha)
    return narrowed(ctx, F.sub(a, F.mul(b, scale)))


@converter(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Context, self: Any, other: Any, alpha: Any = 1) -> Tensor:
    return sub(ctx, other, self, alpha)


@converter(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar)
def mul(ctx: Context, self: Any, other: Any) -> Tensor:
    if ctx.dtype == BOOL:
        a, b = ctx.promote(self, other)
        return F.logical_and(a, b)
    a, b = promoted(ctx, self, other)
    return narrowed(ctx, F.mul(a, b))


@converter(aten.addcmul.default, aten.addcdiv.default)
def add_term(ctx: Context, self: Tensor, tensor1: Any, tensor2: Any, value: Any = 1) -> Tensor:
    """The sum with a product, or with a quotient, of two tensors."""
    x, a, b, scale = promoted_wide(ctx, self, tensor1, tensor2, value)
    term = (F.mul if ctx.operator == "addcmul" else F.div)(a if _is_one(value) else F.mul(scale, a), b)
    return narrowed(ctx, F.add(x, term))


@converter(
    *(aten.maximum.default, aten.max.other, aten.fmax.default),
    *(aten.minimum.default, aten.min.other, aten.fmin.default),
)
def extreme(ctx: Context, self: Any, other: Any) -> Tensor:
    """The larger or the smaller; `fmax` and `fmin` pass over NaN."""
    a, b = promoted(ctx, self, other)
    if ctx.operator in ("fmax", "fmin") and a.dtype in dtypes.FLOATS:
        a, b = F.where(F.isnan(a), b, a), F.where(F.isnan(b), a, b)
    return (larger if "max" in ctx.operator else smaller)(ctx, a, b)


def larger(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    return F.logical_or(a, b) if ctx.dtype == BOOL else narrowed(ctx, kernels.maximum(a, b))


def smaller(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    return F.logical_and(a, b) if ctx.dtype == BOOL else narrowed(ctx, kernels.minimum(a, b))


@converter(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    size = F.abs(a)
    return narrowed(ctx, F.where(is_negative(b), F.neg(size), size))


@converter(aten.hypot.default)
def hypot(ctx: Context, self: Any, other: Any) -> Tensor:
    # Divided by the larger one first: squares of large numbers are infinite, of small ones zero.
    high, low = _ordered(*(F.abs(value) for value in promoted_wide(ctx, self, other)))
    ratio = F.where(F.equal(low, high), 1.0, F.div(low, high))
    length = F.mul(high, F.sqrt(F.add(F.mul(ratio, ratio), 1.0)))
    infinite = F.logical_or(F.equal(high, math.inf), F.equal(low, math.inf))  # even beside a NaN
    return narrowed(ctx, F.where(infinite, math.inf, length))


def _ordered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The larger and the smaller; NaN in both if one is NaN."""
    swap = F.less(a, b)
    return F.where(swap, b, a), F.where(swap, a, b)


# Quotients and remainders, with torch's rules of rounding.


@converter(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def true_divide(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = promoted(ctx, self, other)
    return narrowed(ctx, F.div(a, b))


@converter(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.divide.Tensor_mode, aten.divide.Scalar_mode)
def divide(ctx: Context, self: Any, other: Any, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode is None:
        return true_divide(ctx, self, other)
    if rounding_mode == "floor":
        return floor_divide(ctx, self, other)
    if rounding_mode == "trunc":
        return trunc_divide(ctx, self, other)
    raise ConversionError(f"rounding_mode={rounding_mode!r} is not handled")


@converter(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    if a.dtype in dtypes.FLOATS:
        return narrowed(ctx, _floor_of_floats(a, b))
    return narrowed(ctx, floor_of_ints(a, b))


def trunc_divide(ctx: Context, self: Any, other: Any) -> Tensor:
    """The quotient without its fraction."""
    a, b = promoted_wide(ctx, self, other)
    if a.dtype in dtypes.FLOATS:
        quotient = narrowed(ctx, F.div(a, b))  # torch rounds to a half before it cuts
        return narrowed(ctx, trunc(F.cast(quotient, a.dtype)))
    return narrowed(ctx, quotient_of_ints(a, b))


@converter(prims.div.default)
def prims_div(ctx: Context, self: Any, other: Any) -> Tensor:
    if ctx.dtype in dtypes.FLOATS:
        return true_divide(ctx, self, other)
    return trunc_divide(ctx, self, other)


@converter(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    if a.dtype not in dtypes.FLOATS:
        return narrowed(ctx, F.mod(a, divisor(b)))
    rest = _rest_of_floats(a, b)
    return narrowed(ctx, F.where(_opposed(rest, b), F.add(rest, b), rest))


@converter(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    if a.dtype not in dtypes.FLOATS:
        # Not with `fmod`, which ONNX Runtime computes in float64.
        rest = F.mod(a, divisor(b))
        return narrowed(ctx, F.where(_opposed(rest, a), F.sub(rest, b), rest))
    return narrowed(ctx, _rest_of_floats(a, b))


def _rest_of_floats(a: Tensor, b: Tensor) -> Tensor:
    """C's fmod; a divisor larger than the dividend, infinity above all, leaves the dividend."""
    return F.where(F.less(F.abs(a), F.abs(b)), a, F.mod(a, b, fmod=True))


def _floor_of_floats(a: Tensor, b: Tensor) -> Tensor:
    # Not floor(a / b): 1 // 0.1 is 9, while 1 / 0.1 rounds to 10.
    rest = _rest_of_floats(a, b)
    quotient = F.div(F.sub(a, rest), b)
    quotient = F.where(_opposed(rest, b), F.sub(quotient, 1.0), quotient)
    below = F.floor(quotient)
    below = F.where(F.less(F.constant(0.5, a.dtype), F.sub(quotient, below)), F.add(below, 1.0), below)
    plain = F.div(a, b)
    below = F.where(F.equal(below, 0.0), F.mul(plain, 0.0), below)  # zero has the sign of the quotient
    return F.where(F.equal(b, 0.0), plain, below)


def _opposed(rest: Tensor, b: Tensor) -> Tensor:
    """Where a remainder is not zero and its sign differs from the divisor's."""
    signs = F.logical_xor(F.less(rest, 0), F.less(b, 0))
    return F.logical_and(signs, F.logical_not(F.equal(rest, 0)))


def floor_of_ints(a: Tensor, b: Tensor) -> Tensor:
    """Integers divided towards minus infinity; ONNX divides towards zero."""
    quotient = quotient_of_ints(a, b)
    rest = F.sub(a, F.mul(quotient, b))
    return F.sub(quotient, F.cast(_opposed(rest, b), a.dtype))


def quotient_of_ints(a: Tensor, b: Tensor) -> Tensor:
    """Integers divided towards zero; dividing the smallest integer by -1 would kill the process."""
    quotient = F.div(a, divisor(b))
    if b.constant is not None and not np.any(b.constant == -1):
        return quotient
    return F.where(F.equal(b, -1), F.neg(a), quotient)


def divisor(b: Tensor) -> Tensor:
    """The divisor of integers, with 1 in place of -1; zero is refused, because torch raises there."""
    if b.dtype == ir.DataType.BOOL:
        raise ConversionError("a division of booleans is not handled")
    known = b.constant
    if known is None:
        safe = F.where(F.logical_or(F.equal(b, 0), F.equal(b, -1)), F.constant(1, b.dtype), b)
        return F.add(safe, F.cast(zero_unless(F.equal(b, 0)), b.dtype))
    if not np.all(known):
        raise ConversionError("an integer division by zero is not handled")
    return F.constant(np.where(known == -1, 1, known).astype(known.dtype)) if np.any(known == -1) else b


# Powers.


@converter(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: Context, self: Tensor, exponent: Any) -> Tensor:
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
    """PyTorch computes roots of float16 as powers, which ignore the sign of infinities and zeros."""
    infinity = F.constant(float("inf"), x.dtype)
    x = F.where(F.equal(x, F.constant(float("-inf"), x.dtype)), infinity, x)
    zero = F.constant(0.0, x.dtype)
    return F.where(F.equal(x, zero), zero, x)


@converter(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(ctx: Context, self: Any, exponent: Any) -> Tensor:
    if ctx.dtype == ir.DataType.BOOL:
        raise ConversionError("a power of booleans is not handled")
    if ctx.dtype not in dtypes.FLOATS:
        a, b = (F.cast(x, ir.DataType.INT64) for x in promoted(ctx, self, exponent))
        return narrowed(ctx, _power_of_integers(a, b, ctx.dtype))
    a, b = promoted_wide(ctx, self, exponent)
    return narrowed(ctx, F.pow(a, b))


@converter(aten.ldexp.Tensor)
def ldexp(ctx: Context, self: Tensor, other: Tensor) -> Tensor:
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

    Engines take a power of integers through floats, which loses digits. All steps use int64: an engine
    without int64 would lose digits here too, and refuses the first constant. For a negative exponent torch
    returns zero, unless the base is one or minus one.
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


# Angles.


@converter(aten.atan2.default, aten.arctan2.default)
def atan2(ctx: Context, self: Any, other: Any) -> Tensor:
    y, x = promoted_wide(ctx, self, other)
    height, width = F.abs(y), F.abs(x)
    steep = F.greater(height, width)
    # The smaller side over the larger is at most one; both zero means zero, both infinite means one.
    ratio = F.div(F.where(steep, width, height), F.where(steep, height, width))
    ratio = F.where(F.equal(height, width), F.where(F.equal(height, 0.0), height, 1.0), ratio)
    ratio = F.where(F.logical_or(F.isnan(x), F.isnan(y)), math.nan, ratio)
    angle = F.atan(ratio)
    angle = F.where(steep, F.sub(math.pi / 2, angle), angle)
    angle = F.where(is_negative(x), F.sub(math.pi, angle), angle)
    return narrowed(ctx, F.where(is_negative(y), F.neg(angle), angle))


@converter(aten.angle.default)
def angle(ctx: Context, self: Tensor) -> Tensor:
    """Zero, or pi for negative numbers; NaN stays NaN."""
    if self.dtype in dtypes.UNSIGNED or self.dtype == dtypes.DataType.BOOL:
        return F.mul(F.cast(self, ctx.dtype), F.constant(0.0, ctx.dtype))
    if self.dtype in dtypes.FLOATS:
        self = F.cast(self, torch.float32)  # the sign is the same, and engines have the kernels
    half_turn, none = F.constant(math.pi, torch.float32), F.constant(0.0, torch.float32)
    turned = F.where(F.less(self, F.constant(0, self.dtype)), half_turn, none)
    if self.dtype in dtypes.FLOATS:
        turned = F.where(F.op("IsNaN", self), self, turned)
    return F.cast(turned, ctx.dtype)
