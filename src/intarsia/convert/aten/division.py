"""Quotients and remainders, with torch's rules of rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.demands import zero_unless
from intarsia.convert.aten.unary import trunc
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted, promoted_wide
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten, prims = torch.ops.aten, torch.ops.prims


@converter(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def true_divide(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = promoted(ctx, self, other)
    return narrowed(ctx, F.div(a, b))


@converter(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.divide.Tensor_mode, aten.divide.Scalar_mode)
def divide(ctx: ConversionContext, self: Any, other: Any, *, rounding_mode: str | None) -> Tensor:
    if rounding_mode is None:
        return true_divide(ctx, self, other)
    if rounding_mode == "floor":
        return floor_divide(ctx, self, other)
    if rounding_mode == "trunc":
        return trunc_divide(ctx, self, other)
    raise ConversionError(f"rounding_mode={rounding_mode!r} is not handled")


@converter(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    if a.dtype in dtypes.FLOATS:
        return narrowed(ctx, _floor_of_floats(a, b))
    return narrowed(ctx, floor_of_ints(a, b))


def trunc_divide(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    """The quotient without its fraction."""
    a, b = promoted_wide(ctx, self, other)
    if a.dtype in dtypes.FLOATS:
        quotient = narrowed(ctx, F.div(a, b))  # torch rounds to a half before it cuts
        return narrowed(ctx, trunc(F.cast(quotient, a.dtype)))
    return narrowed(ctx, quotient_of_ints(a, b))


@converter(prims.div.default)
def prims_div(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    if ctx.dtype in dtypes.FLOATS:
        return true_divide(ctx, self, other)
    return trunc_divide(ctx, self, other)


@converter(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = promoted_wide(ctx, self, other)
    if a.dtype not in dtypes.FLOATS:
        return narrowed(ctx, F.mod(a, divisor(b)))
    rest = _rest_of_floats(a, b)
    return narrowed(ctx, F.where(_opposed(rest, b), F.add(rest, b), rest))


@converter(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
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
    """Where a remainder is not zero and has not the sign of the divisor."""
    signs = F.logical_xor(F.less(rest, 0), F.less(b, 0))
    return F.logical_and(signs, F.logical_not(F.equal(rest, 0)))


def floor_of_ints(a: Tensor, b: Tensor) -> Tensor:
    """Integers divided towards minus infinity; ONNX divides towards zero."""
    quotient = quotient_of_ints(a, b)
    rest = F.sub(a, F.mul(quotient, b))
    return F.sub(quotient, F.cast(_opposed(rest, b), a.dtype))


def quotient_of_ints(a: Tensor, b: Tensor) -> Tensor:
    """Integers divided towards zero; the least of them by -1 would kill the process."""
    quotient = F.div(a, divisor(b))
    if b.constant is not None and not np.any(b.constant == -1):
        return quotient
    return F.where(F.equal(b, -1), F.neg(a), quotient)


def divisor(b: Tensor) -> Tensor:
    """What integers may be divided by, 1 in place of -1; zero is refused, for torch raises there."""
    if b.dtype == ir.DataType.BOOL:
        raise ConversionError("a division of booleans is not handled")
    known = b.constant
    if known is None:
        safe = F.where(F.logical_or(F.equal(b, 0), F.equal(b, -1)), F.constant(1, b.dtype), b)
        return F.add(safe, F.cast(zero_unless(F.equal(b, 0)), b.dtype))
    if not np.all(known):
        raise ConversionError("an integer division by zero is not handled")
    return F.constant(np.where(known == -1, 1, known).astype(known.dtype)) if np.any(known == -1) else b
