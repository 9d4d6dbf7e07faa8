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

Compare = Callable[[Any, Any], Tensor]


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


def _different(a: Any, b: Any) -> Tensor:
    return F.logical_not(F.equal(a, b))


# Written as less with the sides swapped: OpenVINO's Greater holds for NaN.
def greater(a: Any, b: Any) -> Tensor:
    return F.less(b, a)


def greater_equal(a: Any, b: Any) -> Tensor:
    return F.less_equal(b, a)


COMPARISONS: dict[str, Compare] = {
    "eq": F.equal,
    "ne": _different,
    "lt": F.less,
    "le": F.less_equal,
    "gt": greater,
    "ge": greater_equal,
}
LOGIC: dict[str, Compare] = {
    "logical_and": F.logical_and,
    "logical_or": F.logical_or,
    "logical_xor": F.logical_xor,
}


def _comparison(name: str, functional: Compare) -> None:
    def compare(ctx: Context, self: Any, other: Any) -> Tensor:
        return functional(*comparable(ctx, self, other))

    compare.__name__ = compare.__qualname__ = name
    packet = getattr(aten, name)
    converter(packet.Tensor, packet.Scalar)(compare)


def _logic(name: str, functional: Compare) -> None:
    def logic(ctx: Context, self: Any, other: Any) -> Tensor:
        return functional(truth(self), truth(other))

    logic.__name__ = logic.__qualname__ = name
    converter(getattr(aten, name).default)(logic)


for _name, _functional in COMPARISONS.items():
    _comparison(_name, _functional)
for _name, _functional in LOGIC.items():
    _logic(_name, _functional)


@converter(aten.logical_not.default)
def logical_not(ctx: Context, self: Tensor) -> Tensor:
    return F.logical_not(truth(self))


def always(x: Tensor) -> Tensor:
    """True everywhere, for values that equal themselves."""
    return F.equal(x, x)


@converter(aten.isnan.default, aten.isinf.default)
def is_special(ctx: Context, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.logical_not(always(self))
    return (F.isnan if ctx.operator == "isnan" else F.isinf)(F.cast(self, native(self.dtype)))


@converter(aten.isfinite.default)
def isfinite(ctx: Context, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return always(self)
    return finite(F.cast(self, native(self.dtype)))


def finite(x: Tensor) -> Tensor:
    """Whether elements are neither infinite nor NaN; no comparison with NaN is true."""
    return F.less(F.abs(x), math.inf)


# Bits of integers (of booleans: logic), and shifts.

Pair = Callable[[Any, Any], Tensor]


def _register(name: str, dunder: str, of_bits: Pair, of_truths: Pair) -> None:
    def bitwise(ctx: Context, self: Any, other: Any) -> Tensor:
        a, b = ctx.promote(self, other)
        return of_truths(a, b) if ctx.dtype == BOOL else of_bits(a, b)

    bitwise.__name__ = bitwise.__qualname__ = name
    packet, operator = getattr(aten, name), getattr(aten, dunder)
    targets = (packet.Tensor, packet.Scalar, packet.Scalar_Tensor, operator.Tensor, operator.Scalar)
    converter(*targets)(bitwise)


_register("bitwise_and", "__and__", F.bitwise_and, F.logical_and)
_register("bitwise_or", "__or__", F.bitwise_or, F.logical_or)
_register("bitwise_xor", "__xor__", F.bitwise_xor, F.logical_xor)


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
