"""Comparisons, logic, bits, and choices between values: clamp, where, masked_fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.arithmetic import floor_of_ints, larger, smaller
from intarsia.convert.context import Context, narrowed, native, number, promoted
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
BOOL = ir.DataType.BOOL

Pair = Callable[[Any, Any], Tensor]


def comparable(ctx: Context, a: Any, b: Any) -> tuple[Tensor, ...]:
    """Both in torch's common dtype, or a wider one that engines compare in."""
    a, b = ctx.common(a, b)
    dtype = ir.DataType.INT32 if a.dtype == BOOL else native(a.dtype)
    return F.cast(a, dtype), F.cast(b, dtype)


def truth(value: Any) -> Tensor:
    """The elements that torch treats as true: all but zero, including NaN, which engines cast differently."""
    if not isinstance(value, Tensor):
        return F.constant(value, BOOL)
    if value.dtype not in dtypes.FLOATS:
        return F.cast(value, BOOL)
    return F.logical_not(F.equal(F.cast(value, native(value.dtype)), 0.0))


COMPARISONS: dict[str, Pair] = {
    "eq": F.equal,
    "ne": lambda a, b: F.logical_not(F.equal(a, b)),
    "lt": F.less,
    "le": F.less_equal,
    "gt": lambda a, b: F.less(b, a),  # OpenVINO's Greater holds for NaN
    "ge": lambda a, b: F.less_equal(b, a),
}


@converter(*(getattr(getattr(aten, name), kind) for name in COMPARISONS for kind in ("Tensor", "Scalar")))
def compare(ctx: Context, self: Any, other: Any) -> Tensor:
    return COMPARISONS[ctx.operator](*comparable(ctx, self, other))


@converter(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def logic(ctx: Context, self: Any, other: Any) -> Tensor:
    layer: Pair = getattr(F, ctx.operator)
    return layer(truth(self), truth(other))


@converter(aten.logical_not.default)
def logical_not(ctx: Context, self: Tensor) -> Tensor:
    return F.logical_not(truth(self))


@converter(aten.isnan.default, aten.isinf.default, aten.isfinite.default)
def is_special(ctx: Context, self: Tensor) -> Tensor:
    asks_finite = ctx.operator == "isfinite"
    if self.dtype not in dtypes.FLOATS:
        every = F.equal(self, self)
        return every if asks_finite else F.logical_not(every)
    x = F.cast(self, native(self.dtype))
    if asks_finite:
        return F.less(F.abs(x), math.inf)  # no comparison with NaN is true
    return F.isnan(x) if ctx.operator == "isnan" else F.isinf(x)


# Bits of integers (of booleans: logic), and shifts.

BITS: dict[str, tuple[Pair, Pair]] = {  # of integers, of booleans
    "and": (F.bitwise_and, F.logical_and),
    "or": (F.bitwise_or, F.logical_or),
    "xor": (F.bitwise_xor, F.logical_xor),
}
_OPERATORS = [getattr(aten, form.format(name)) for name in BITS for form in ("bitwise_{}", "__{}__")]


@converter(
    *(overload for packet in _OPERATORS for overload in (packet.Tensor, packet.Scalar)),
    *(getattr(aten, f"bitwise_{name}").Scalar_Tensor for name in BITS),
)
def bitwise(ctx: Context, self: Any, other: Any) -> Tensor:
    of_bits, of_truths = BITS[ctx.operator.removeprefix("bitwise_").strip("_")]
    a, b = ctx.promote(self, other)
    return of_truths(a, b) if ctx.dtype == BOOL else of_bits(a, b)


@converter(aten.bitwise_not.default)
def bitwise_not(ctx: Context, self: Tensor) -> Tensor:
    return F.logical_not(self) if self.dtype == BOOL else F.bitwise_not(self)


@converter(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
def left_shift(ctx: Context, self: Any, other: Any) -> Tensor:
    # ONNX shifts unsigned integers only; a product with a power of two wraps just as a shift does.
    a, b = _shiftable(ctx, self, other)
    if _is_plain(other, ctx.dtype):
        return narrowed(ctx, F.mul(a, 1 << other))
    return narrowed(ctx, F.mul(a, F.gather(_powers(a.dtype), _places(b, _width(ctx.dtype), _width(a.dtype)))))


@converter(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def right_shift(ctx: Context, self: Any, other: Any) -> Tensor:
    a, b = _shiftable(ctx, self, other)
    if _is_plain(other, ctx.dtype):
        return narrowed(ctx, floor_of_ints(a, F.constant(1 << other, a.dtype)))
    last = _width(a.dtype) - 1
    places = _places(b, _width(ctx.dtype), last)
    shifted = floor_of_ints(a, F.gather(_powers(a.dtype), places))
    # The last power of two has no positive integer; all bits but the sign are gone there.
    sign = F.neg(F.cast(F.less(a, 0), a.dtype))
    return narrowed(ctx, F.where(F.equal(places, last), sign, shifted))


def _shiftable(ctx: Context, self: Any, other: Any) -> tuple[Tensor, Tensor]:
    if ctx.dtype not in dtypes.INTEGERS:
        raise ConversionError(f"a shift of {ctx.dtype.name} is not handled")
    a, b = promoted(ctx, self, other)
    return a, b


def _is_plain(places: Any, dtype: ir.DataType) -> bool:
    """Whether a number of places is known now and its power of two is a positive integer."""
    return isinstance(places, int) and 0 <= places < _width(dtype) - 1


def _width(dtype: ir.DataType) -> int:
    return dtypes.to_numpy(dtype).itemsize * 8


def _powers(dtype: ir.DataType) -> Tensor:
    """Two to each number of places, and zero at the end, for more places than there are bits."""
    powers = np.array([1 << place for place in range(_width(dtype))] + [0], dtype=np.uint64)
    return F.constant(powers.astype(dtypes.to_numpy(dtype)))


def _places(b: Tensor, width: int, beyond: int) -> Tensor:
    """Numbers of places; negative ones count as too many, and too many are `beyond`."""
    places = F.cast(b, ir.DataType.INT64)
    outside = F.logical_or(F.less(places, 0), F.less(F.constant(width - 1, ir.DataType.INT64), places))
    return F.where(outside, beyond, places)


# Choices between values: clamp, where, masked_fill.


@converter(
    aten.clamp.default,
    aten.clip.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.clamp.Tensor,
    aten.clip.Tensor,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
)
def clamp(ctx: Context, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = self if min is None else larger(ctx, *promoted(ctx, self, min))
        return x if max is None else smaller(ctx, *promoted(ctx, x, max))
    for bound in (min, max):
        if isinstance(bound, float) and math.isnan(bound):
            raise ConversionError("a bound that is NaN is not handled")
    (x,) = promoted(ctx, self)
    # A bound left out would be the largest finite number to ONNX, and cut infinities off.
    endless = math.inf if x.dtype in dtypes.FLOATS else None
    low = _bound(ctx, -math.inf if min is None and endless else min, x)
    high = _bound(ctx, endless if max is None else max, x)
    return narrowed(ctx, kernels.clip(x, low, high))


def _bound(ctx: Context, value: Any, x: Tensor) -> Tensor | None:
    return None if value is None else number(ctx, value, x.dtype)


@converter(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(ctx: Context, condition: Tensor, self: Any, other: Any) -> Tensor:
    a, b = ctx.promote(self, other)
    return choose(ctx, truth(condition), a, b)


@converter(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, self: Tensor, mask: Tensor, value: Any) -> Tensor:
    return choose(ctx, truth(mask), ctx.tensor(value, ctx.dtype), self)


def choose(ctx: Context, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Where, in a dtype that it has a kernel for."""
    dtype = ir.DataType.UINT8 if ctx.dtype == BOOL else native(ctx.dtype)
    return narrowed(ctx, F.where(condition, F.cast(a, dtype), F.cast(b, dtype)))
