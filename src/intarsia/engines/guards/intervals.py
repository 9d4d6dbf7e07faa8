"""Intervals: the least and the largest value that tensors may hold, and what constants hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.network import dtypes
from intarsia.network.network import Layer, Network, Tensor
from intarsia.network.ops import KEEPS_VALUES, MOVES_DATA, MULTIPLIES_WEIGHTS

INF = math.inf
_ROUNDING = {ir.DataType.FLOAT16: 2**-10, ir.DataType.BFLOAT16: 2**-7}
_TINY = 1e-37  # smaller numbers may be flushed to zero


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds, both included; `nan` says whether NaN may be among the elements.

    >>> Interval(-1, 3) * Interval(2, 5) + Interval(1, 1)
    Interval(low=-4, high=16, nan=False)
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
    def is_finite(self) -> bool:
        return self.reach < INF and not self.nan

    def within(self, other: Interval) -> bool:
        return not self.nan and other.low <= self.low and self.high <= other.high

    def cut(self, other: Interval) -> Interval:
        """The part of this interval that lies inside another, which is assumed to hold."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return other if low > high else Interval(low, high, self.nan and other.nan)

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval after an increasing function."""
        return Interval(_end(function, self.low), _end(function, self.high), self.nan)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.nan)

    def __or__(self, other: Interval) -> Interval:
        """The least interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high), self.nan or other.nan)

    def __add__(self, other: Interval) -> Interval:
        opposed = INF in (self.high, other.high) and -INF in (self.low, other.low)
        low = -INF if -INF in (self.low, other.low) else self.low + other.low
        high = INF if INF in (self.high, other.high) else self.high + other.high
        return Interval(low, high, self.nan or other.nan or opposed)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        pairs = product((self.low, self.high), (other.low, other.high))
        ends = [0 if 0 in pair else pair[0] * pair[1] for pair in pairs]
        lost = (self.has_zero and other.reach == INF) or (self.reach == INF and other.has_zero)
        return Interval(min(ends), max(ends), self.nan or other.nan or lost)

    def __abs__(self) -> Interval:
        low = 0 if self.low < 0 < self.high else min(abs(self.low), abs(self.high))
        return Interval(low, self.reach, self.nan)


def _end(function: Callable[[float], float], bound: float) -> float:
    try:
        return bound if bound == INF else function(bound)
    except OverflowError:
        return INF if bound > 0 else -INF


ANYTHING, ZERO = Interval(-INF, INF, True), Interval(0, 0)


def around(reach: float, nan: bool = False) -> Interval:
    """Everything up to a magnitude; beyond what floats hold, partial sums of both signs may have met."""
    return Interval(-reach, reach, nan or reach > 3e38)


def whole(dtype: ir.DataType) -> Interval:
    """Everything a type can hold."""
    if dtype in dtypes.UNSIGNED:
        return Interval(0, 2**dtype.bitwidth - 1)
    if dtype in dtypes.SIGNED:
        return Interval(-(2 ** (dtype.bitwidth - 1)), 2 ** (dtype.bitwidth - 1) - 1)
    return Interval(0, 1) if dtype == ir.DataType.BOOL else ANYTHING


def fit(dtype: ir.DataType, interval: Interval) -> Interval:
    """An interval as a type holds it: integers wrap, floats round and become infinite."""
    if dtype in dtypes.INTEGERS:
        return interval if interval.within(whole(dtype)) else whole(dtype)
    if dtype not in dtypes.FLOATS:
        return whole(dtype)
    if math.isnan(interval.low) or math.isnan(interval.high):
        return ANYTHING
    largest, step = torch.finfo(dtypes.to_torch(dtype)).max, _ROUNDING.get(dtype, 2**-22)

    def rounded(bound: float) -> float:  # what rounds down to the largest number is not infinite
        if bound > largest:
            return largest if bound <= largest * (1 + step / 8) else INF
        return min(max(bound, -largest) + step * min(abs(bound), largest), largest)

    return Interval(-rounded(-interval.low), rounded(interval.high), interval.nan)


def torch_constant(tensor: Tensor) -> torch.Tensor | None:
    """A constant as in torch, halves in float32; None if there is none, or torch cannot order its dtype."""
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


def constant_range(tensor: Tensor) -> Interval:
    """From the least to the largest element of a constant; any value, if it is not a constant."""
    values = torch_constant(tensor)
    if values is None:
        return whole(tensor.dtype)
    if values.numel() == 0:
        return ZERO
    low, high = (end.item() for end in torch.aminmax(values.int() if values.dtype == torch.bool else values))
    return ANYTHING if low != low else Interval(low, high)


def is_weight(layer: Layer, tensor: Tensor) -> bool:
    """Whether the rule of a layer looks at a constant itself, so that no other code has to."""
    is_product = layer.kind in MULTIPLIES_WEIGHTS and tensor.dtype in dtypes.FLOATS
    return is_product and tensor.value.const_value is not None


def range_of(tensor: Tensor, known: dict[ir.Value, Interval]) -> Interval:
    """The known interval of a tensor; a constant is read once."""
    interval = known.get(tensor.value)
    if interval is None:
        interval = known[tensor.value] = constant_range(tensor)
    return interval


def weight_sum(weight: Tensor, over: Sequence[int]) -> float | None:
    """No less than the largest sum of magnitudes along these axes of a constant of floats."""
    values = torch_constant(weight)
    if values is None or not values.dtype.is_floating_point:
        return None
    if not values.numel():
        return 0.0
    if values.ndim > 2 and over[-1] == values.ndim - 1:
        return float(torch.linalg.vector_norm(values, 1, dim=list(over)).max())
    # Sums take ten times as long, and norms follow most matrices; no sum exceeds this.
    flat = values.reshape(-1)
    return 1.01 * math.sqrt(math.prod(values.shape[axis] for axis in over) * float(torch.dot(flat, flat)))


# Constants that engines multiply ahead of time, or divide by through a reciprocal that overflows.

_SMALLEST_NORMAL = 2.0**-126
_HAS_DENORMALS = frozenset({ir.DataType.FLOAT, ir.DataType.BFLOAT16})  # as float32, float16's are normal
_LIMITS = torch.finfo(torch.float32)


def divides_by_floats(layer: Layer) -> bool:
    """Whether a layer divides by numbers that may be denormal in float32.

    OpenVINO (2026.4) multiplies by the reciprocal, which overflows below 2**-128: 0 by such a number was NaN.
    A guard would reduce every divisor in every call, so both operands are multiplied by 2**64 there.
    """
    return layer.kind == "Div" and layer.get_outputs(0)[0].dtype in _HAS_DENORMALS


def may_be_denormal(divisor: Tensor, interval: Interval) -> bool:
    """Whether elements may be denormal, as far as a constant or the interval shows."""
    if divisor.constant is not None:
        sizes = abs(divisor.constant)
        return bool(((sizes > 0) & (sizes < _SMALLEST_NORMAL)).any())
    return interval.has_zero


def merged_out_of_range(layers: Iterable[Layer]) -> str | None:
    """The first layer whose constant factor, merged with the constants before it, exceeds float32, as text.

    Engines multiply constant factors with each other and into weights, and no option forbids that alone:
    `x * 1e20 * 1e20` is one product by infinity then, which makes NaN of 0 where PyTorch makes 0. A network
    where the merged constant would overflow or vanish is cut between the two.
    """
    chains: dict[ir.Value, tuple[float, float]] = {}  # the weight that made a tensor, and factors after it
    for layer in layers:
        inputs = layer.get_inputs()
        live = [tensor for tensor in inputs if tensor is not None and tensor.constant is None]
        if len(live) != 1 or live[0].dtype not in dtypes.FLOATS:
            continue
        weight, after = chains.get(live[0].value, (1.0, 1.0))
        factor = _factor(layer, inputs, live[0])
        if factor is None:
            if layer.kind in KEEPS_VALUES | {"Add", "Sub"}:
                chains[layer.get_outputs(0)[0].value] = weight, after
            continue
        # Zeros and infinities stay what they are in whichever order.
        factor = factor if 0.0 < factor < math.inf else 1.0
        is_product = layer.kind in MULTIPLIES_WEIGHTS  # weights are not multiplied with each other
        merged = after * factor * (1.0 if is_product else weight)
        if merged != factor and not _LIMITS.tiny <= merged <= _LIMITS.max:
            reason = f"makes a factor of up to {merged:g}, which float32 cannot hold"
            return f"{layer.kind} {layer.name} by a constant, merged with the constants before it, {reason}"
        chains[layer.get_outputs(0)[0].value] = (factor, 1.0) if is_product else (weight, after * factor)
    return None


def _factor(layer: Layer, inputs: Sequence[Tensor | None], live: Tensor) -> float | None:
    """The largest magnitude that a layer multiplies its input by; None where it does something else."""
    constants = [torch_constant(tensor) for tensor in inputs if tensor is not None and tensor is not live]
    if layer.kind == "BatchNormalization" and inputs[0] is live:
        scale, _, _, variance = (value.double() for value in constants if value is not None)
        factors = scale / (variance + float(layer.attribute("epsilon", 1e-5))).sqrt()
    elif layer.kind == "Div" and inputs[0] is live and constants[0] is not None:
        factors = 1 / constants[0].double()
    elif layer.kind in MULTIPLIES_WEIGHTS | {"Mul"} and constants and constants[0] is not None:
        factors = constants[0]
    else:
        return None
    return float(factors.abs().amax()) if factors.numel() else None


def read_by_softmax_alone(layers: list[Layer], net: Network) -> set[ir.Value]:
    """The values that only a softmax reads: masks consist of minus infinity, or of the least number."""
    scores: set[ir.Value] = set()
    outputs = {tensor.value for tensor in net.get_outputs()}
    uses: dict[ir.Value, list[tuple[Layer, int]]] = {}
    for layer in layers:
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is not None:
                uses.setdefault(tensor.value, []).append((layer, index))

    def is_masked(layer: Layer, index: int) -> bool:
        if layer.kind == "Softmax" or (layer.kind == "Attention" and index == 3):
            return True
        passes = layer.kind in MOVES_DATA or layer.kind in ("Add", "Equal")
        return passes and all(tensor.value in scores for tensor in layer.get_outputs())

    values = [tensor.value for layer in reversed(layers) for tensor in layer.get_outputs()]
    for value in [*values, *(tensor.value for tensor in net.get_inputs())]:
        readers = uses.get(value, [])
        if readers and value not in outputs and all(is_masked(*use) for use in readers):
            scores.add(value)
    return scores


def read_layers(net: Network) -> list[Layer]:
    """The layers that the outputs depend on; engines drop the others."""
    needed = {tensor.value for tensor in net.get_outputs()}
    layers: list[Layer] = []
    for layer in reversed(list(net.get_layers())):
        if any(tensor.value in needed for tensor in layer.get_outputs()):
            needed.update(tensor.value for tensor in layer.get_inputs() if tensor is not None)
            layers.append(layer)
    return layers[::-1]
