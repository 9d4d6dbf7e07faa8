"""Bits of integers (of booleans: logic), and shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.division import floor_of_ints
from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import narrowed, promoted
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
BOOL = ir.DataType.BOOL
Pair = Callable[[Any, Any], Tensor]


def _register(name: str, dunder: str, of_bits: Pair, of_truths: Pair) -> None:
    def bitwise(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
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
def bitwise_not(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.logical_not(self) if self.dtype == BOOL else F.bitwise_not(self)


@converter(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
def left_shift(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
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
def right_shift(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
    a, b = _shiftable(ctx, self, other)
    if _is_plain(other, ctx.dtype):
        return narrowed(ctx, floor_of_ints(a, F.constant(1 << other, a.dtype)))
    last = _width(a.dtype) - 1
    places = _places(b, _width(ctx.dtype), last)
    shifted = floor_of_ints(a, F.gather(_powers(a.dtype), places))
    # The last power of two has no positive integer; all bits but the sign are gone there.
    sign = F.neg(F.cast(F.less(a, 0), a.dtype))
    return narrowed(ctx, F.where(F.equal(places, last), sign, shifted))


def _shiftable(ctx: ConversionContext, self: Any, other: Any) -> tuple[Tensor, Tensor]:
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
