"""What lies between two numbers, and how the rules of layers are found that compute with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from intarsia.network import dtypes
from intarsia.network.network import Layer, Network, Tensor
from intarsia.network.ops import MULTIPLIES_WEIGHTS

# An interval: the least and the largest value that a tensor's elements may have.


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


# Which values the tensors of a network may have: one rule an operator, one pass in order.


Given = Sequence[Interval | None]
IntervalRule = Callable[[Layer, Given], Interval | Sequence[Interval]]

_RULES: dict[str, IntervalRule] = {}
# More elements than any tensor that fits a machine's memory, and the largest size along one dimension.
MOST_ELEMENTS = 2**40
LONGEST = 2**31 - 1
_MANY = 2**16
SQUARES_FIT = 1e18  # the square of a larger number may be infinite


def ranges_of(*kinds: str) -> Callable[[IntervalRule], IntervalRule]:
    """Register the rule of operators: from the intervals of a layer's inputs to those of its outputs."""

    def register(rule: IntervalRule) -> IntervalRule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


def layer_ranges(layer: Layer, given: Given) -> list[Interval]:
    """The interval of every output; an operator without a rule may make anything."""
    rule = _RULES.get(layer.kind)
    kinds = [tensor.dtype for tensor in layer.get_outputs()]
    if rule is None:
        return [whole(dtype) for dtype in kinds]
    found = rule(layer, given)
    made = [found] if isinstance(found, Interval) else list(found)
    made += [whole(dtype) for dtype in kinds[len(made) :]]
    return [fit(dtype, interval) for dtype, interval in zip(kinds, made)]  # noqa: B905  (outputs may be left out)


def network_ranges(net: Network, inputs: dict[str, Interval] | None = None) -> dict[ir.Value, Interval]:
    """The interval of every tensor, given those of the inputs, which else may hold anything.

    >>> from intarsia.network import functional as F, net_guard
    >>> net = Network("tiny")
    >>> with net_guard(net):
    ...     i = Tensor("i", torch.int64, (3,))
    ...     (i * 2 + 1).mark_output("odd")
    >>> network_ranges(net, {"i": Interval(0, 9)})[net.get_outputs()[0].value][:2]
    (1, 19)
    """
    known: dict[ir.Value, Interval] = {}
    for tensor in net.get_inputs():
        known[tensor.value] = (inputs or {}).get(tensor.name, whole(tensor.dtype))
    for layer in net.get_layers():
        given = [None if t is None or is_weight(layer, t) else range_of(t, known) for t in layer.get_inputs()]
        outputs = layer.get_outputs()
        for tensor, interval in zip(outputs, layer_ranges(layer, given), strict=True):
            known[tensor.value] = interval
    return known


def is_weight(layer: Layer, tensor: Tensor) -> bool:
    """Whether the rule of a layer looks at a constant itself, so that nobody else need do so."""
    return (
        layer.kind in MULTIPLIES_WEIGHTS
        and tensor.dtype in dtypes.FLOATS
        and tensor.value.const_value is not None
    )


def range_of(tensor: Tensor, known: dict[ir.Value, Interval]) -> Interval:
    """What is known of a tensor; a constant is looked at once."""
    found = known.get(tensor.value)
    if found is None:
        found = known[tensor.value] = constant_range(tensor)
    return found


def constant_range(tensor: Tensor) -> Interval:
    """From the least to the largest element of a constant; anything, for what is no constant."""
    values = torch_constant(tensor)
    if values is None:
        return whole(tensor.dtype)
    if values.numel() == 0:
        return Interval(0, 0)
    if values.dtype == torch.bool:
        return Interval(int(values.all()), int(values.any()))
    if values.numel() > _MANY and values.dtype == torch.float32:
        size = root_of_squares(values)
        return Interval(-size, size, math.isnan(size)) if size < INF else Interval(-INF, INF, True)
    low, high = torch.aminmax(values)
    if not values.dtype.is_floating_point:
        return Interval(int(low), int(high))
    nan = bool(torch.isnan(low))
    return Interval(-INF, INF, True) if nan else Interval(float(low), float(high))


def root_of_squares(values: torch.Tensor) -> float:
    """The norm of all elements: no less than any of them, and sooner found than the largest."""
    flat = values.reshape(-1)
    return 1.01 * math.sqrt(float(torch.dot(flat, flat)))


def torch_constant(tensor: Tensor) -> torch.Tensor | None:
    """A constant as torch has it, halves in float32; None if it is none or has a type torch cannot order."""
    array: Any = tensor.constant
    if array is None or tensor.dtype not in dtypes.FLOATS | dtypes.INTEGERS | {ir.DataType.BOOL}:
        return None
    if tensor.dtype in dtypes.FLOATS and tensor.dtype != ir.DataType.DOUBLE:
        array = np.asarray(array, dtype=np.float32)
    elif tensor.dtype in dtypes.UNSIGNED and tensor.dtype.bitwidth > 8:
        array = np.asarray(array).astype(np.int64)  # torch does not order these
        if array.size and array.min() < 0:
            return None
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def count(tensor: Tensor, axes: Sequence[int]) -> int:
    """How many elements there are along some axes, or a number beyond any that fits a machine."""
    total = 1
    for axis in axes:
        size = tensor.shape[axis]
        if not isinstance(size, int):
            return MOST_ELEMENTS
        total *= size
    return total


def longest(tensor: Tensor, axis: int) -> int:
    """The size along an axis, or a number that none exceeds."""
    size = tensor.shape[axis]
    return size if isinstance(size, int) else LONGEST


def reduced_axes(layer: Layer) -> list[int]:
    """The axes a reduction runs over."""
    inputs = layer.get_inputs()
    x = inputs[0]
    assert x is not None
    named = inputs[1] if len(inputs) > 1 else None
    if named is None:
        return [] if layer.attribute("noop_with_empty_axes", 0) else list(range(x.ndim))
    if named.constant is None:
        return list(range(x.ndim))
    axes = [int(axis) for axis in named.constant.reshape(-1)]
    return axes or ([] if layer.attribute("noop_with_empty_axes", 0) else list(range(x.ndim)))


def reduced_count(layer: Layer) -> int:
    """How many elements a reduction makes one of."""
    x = layer.get_inputs(0)[0]
    assert x is not None
    return count(x, reduced_axes(layer))
