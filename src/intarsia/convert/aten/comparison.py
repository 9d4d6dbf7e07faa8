"""Comparisons and logic: results are booleans."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.promotion import native, wide
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
BOOL = ir.DataType.BOOL
Compare = Callable[[Any, Any], Tensor]


def comparable(ctx: ConversionContext, a: Any, b: Any) -> tuple[Tensor, ...]:
    """Both in torch's common dtype, or a wider one that engines compare in."""
    a, b = ctx.common(a, b)
    dtype = ir.DataType.INT32 if a.dtype == BOOL else native(a.dtype)
    return F.cast(a, dtype), F.cast(b, dtype)


def truth(value: Any) -> Tensor:
    """What torch takes for true: all but zero, NaN included, which engines cast differently."""
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
    "not_equal": _different,
    "lt": F.less,
    "less": F.less,
    "le": F.less_equal,
    "less_equal": F.less_equal,
    "gt": greater,
    "greater": greater,
    "ge": greater_equal,
    "greater_equal": greater_equal,
}
LOGIC: dict[str, Compare] = {
    "logical_and": F.logical_and,
    "logical_or": F.logical_or,
    "logical_xor": F.logical_xor,
}


def _comparison(name: str, functional: Compare) -> None:
    def compare(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
        return functional(*comparable(ctx, self, other))

    compare.__name__ = compare.__qualname__ = name
    packet = getattr(aten, name)
    converter(packet.Tensor, packet.Scalar)(compare)


def _logic(name: str, functional: Compare) -> None:
    def logic(ctx: ConversionContext, self: Any, other: Any) -> Tensor:
        return functional(truth(self), truth(other))

    logic.__name__ = logic.__qualname__ = name
    converter(getattr(aten, name).default)(logic)


for _name, _functional in COMPARISONS.items():
    _comparison(_name, _functional)
for _name, _functional in LOGIC.items():
    _logic(_name, _functional)


@converter(aten.logical_not.default)
def logical_not(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.logical_not(truth(self))


def always(x: Tensor) -> Tensor:
    """True everywhere, for values that equal themselves."""
    return F.equal(x, x)


@converter(aten.isnan.default)
def isnan(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.logical_not(always(self))
    return F.isnan(F.cast(self, native(self.dtype)))


@converter(aten.isinf.default)
def isinf(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.logical_not(always(self))
    return F.isinf(F.cast(self, native(self.dtype)))


@converter(aten.isposinf.default)
def isposinf(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.logical_not(always(self))
    return F.equal(F.cast(self, native(self.dtype)), math.inf)


@converter(aten.isneginf.default)
def isneginf(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return F.logical_not(always(self))
    return F.equal(F.cast(self, native(self.dtype)), -math.inf)


@converter(aten.isfinite.default)
def isfinite(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.dtype not in dtypes.FLOATS:
        return always(self)
    return finite(F.cast(self, native(self.dtype)))


@converter(aten.isreal.default)
def isreal(ctx: ConversionContext, self: Tensor) -> Tensor:
    x = F.cast(self, native(self.dtype))
    return F.logical_or(always(x), _different(x, x))


def finite(x: Tensor) -> Tensor:
    """Neither infinite nor NaN, which is below nothing."""
    return F.less(F.abs(x), math.inf)


@converter(aten.isclose.default)
def isclose(
    ctx: ConversionContext,
    self: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> Tensor:
    dtype = wide(self.dtype) if self.dtype in dtypes.FLOATS else ir.DataType.FLOAT
    same = F.equal(self, other) if self.dtype not in dtypes.FLOATS else None
    a, b = F.cast(self, dtype), F.cast(other, dtype)
    close = F.equal(a, b) if same is None else same
    if equal_nan and same is None:
        close = F.logical_or(close, F.logical_and(F.isnan(a), F.isnan(b)))
    gap = F.abs(F.sub(a, b))
    allowed = F.add(F.abs(F.mul(b, rtol)), atol)
    return F.logical_or(close, F.logical_and(finite(gap), F.less_equal(gap, allowed)))
