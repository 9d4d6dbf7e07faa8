"""An interval: the least and the largest value that a tensor's elements may have."""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from intarsia.network import dtypes

INF = math.inf
# The largest finite number of a float type; smaller ones than _TINY may be flushed to zero.
_LARGEST = {
    ir.DataType.FLOAT: 3.4028234663852886e38,
    ir.DataType.FLOAT16: 65504.0,
    ir.DataType.BFLOAT16: 3.3895313892515355e38,
    ir.DataType.DOUBLE: 1.7976931348623157e308,
}
_ROUNDING = {ir.DataType.FLOAT16: 2**-10, ir.DataType.BFLOAT16: 2**-7}
_TINY = 1e-37


class Interval(NamedTuple):
    """Bounds, both included; `nan` tells whether not-a-number may be among the elements.

    >>> Interval(-1, 3).within(Interval(-5, 5))
    True
    """

    low: float
    high: float
    nan: bool = False

    @property
    def reach(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def has_zero(self) -> bool:
        return self.low < _TINY and self.high > -_TINY

    @property
    def has_inf(self) -> bool:
        return self.reach == INF

    def within(self, other: Interval) -> bool:
        return not self.nan and other.low <= self.low and self.high <= other.high

    def cut(self, other: Interval) -> Interval:
        """What of this interval lies inside another, which is told to hold."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return other if low > high else Interval(low, high, self.nan and other.nan)


BOOL = Interval(0, 1)


def hull(*intervals: Interval) -> Interval:
    """The least interval that holds all of these."""
    return Interval(
        min(i.low for i in intervals), max(i.high for i in intervals), any(i.nan for i in intervals)
    )


def whole(dtype: ir.DataType) -> Interval:
    """Everything a type can hold."""
    if dtype in dtypes.UNSIGNED:
        return Interval(0, 2**dtype.bitwidth - 1)
    if dtype in dtypes.SIGNED:
        return Interval(-(2 ** (dtype.bitwidth - 1)), 2 ** (dtype.bitwidth - 1) - 1)
    return BOOL if dtype == ir.DataType.BOOL else Interval(-INF, INF, True)


def fit(dtype: ir.DataType, found: Interval) -> Interval:
    """An interval as a type holds it: integers wrap, floats round and become infinite."""
    if dtype in dtypes.INTEGERS:
        everything = whole(dtype)
        return found if found.within(everything) else everything
    if dtype not in dtypes.FLOATS:
        return whole(dtype)
    if math.isnan(found.low) or math.isnan(found.high):
        return Interval(-INF, INF, True)
    largest, step = _LARGEST[dtype], _ROUNDING.get(dtype, 2**-22)
    low, high = _rounded(-float(found.low), largest, step), _rounded(float(found.high), largest, step)
    return Interval(-low, high, found.nan)


def _rounded(bound: float, largest: float, step: float) -> float:
    """No less than a bound after rounding; what rounds down to the largest number is not infinite."""
    if bound > largest:
        return largest if bound <= largest * (1 + step / 8) else INF
    return min(max(bound, -largest) + step * min(abs(bound), largest), largest)


def neg(a: Interval) -> Interval:
    return Interval(-a.high, -a.low, a.nan)


def add(a: Interval, b: Interval) -> Interval:
    opposed = (a.high == INF and b.low == -INF) or (a.low == -INF and b.high == INF)
    return Interval(_plus(a.low, b.low, -INF), _plus(a.high, b.high, INF), a.nan or b.nan or opposed)


def _plus(a: float, b: float, otherwise: float) -> float:
    return otherwise if abs(a) == INF and abs(b) == INF and a != b else a + b


def mul(a: Interval, b: Interval) -> Interval:
    ends = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    lost = (a.has_zero and b.has_inf) or (a.has_inf and b.has_zero)
    return Interval(min(ends), max(ends), a.nan or b.nan or lost)


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def times(count: float, a: Interval) -> Interval:
    """A sum of up to `count` elements, added in any order."""
    low, high = _loose(_times(count, min(a.low, 0))), _loose(_times(count, max(a.high, 0)))
    overflows = low < -3e38 and high > 3e38
    return Interval(low, high, a.nan or overflows)


def _loose(total: float) -> float:
    """A sum of floats with all its roundings; a sum of integers has none."""
    return total if isinstance(total, int) else total * 1.01


def around(reach: float, nan: bool = False) -> Interval:
    """Everything up to a magnitude; beyond what floats hold, partial sums of both signs may have met."""
    return Interval(-reach, reach, nan or reach > 3e38)
