"""Which values the tensors of a network may have: one rule an operator, one pass in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals.interval import INF, Interval, fit, whole
from intarsia.network import dtypes
from intarsia.network.network import Layer, Network, Tensor
from intarsia.network.ops import MULTIPLIES_WEIGHTS

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
