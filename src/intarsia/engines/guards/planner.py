"""The conditions under which an engine gives PyTorch's answers, and the tensors to check.

Kernels lose NaN, compute integers in float32 or cut them to 32 bits, read anything for an index out of range:
an engine says which. Where the intervals of a network do not rule that out, a guard watches a tensor.

Guards watch instead of computing twice: an exact layer for every kernel that deviates would cost every model
its fusions, for values that do not come. A network of a hundred layers needs a handful of guards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from intarsia.engines.guards.interval_rules import layer_ranges
from intarsia.engines.guards.intervals import (
    Interval,
    divides_by_floats,
    is_weight,
    may_be_denormal,
    merged_out_of_range,
    range_of,
    read_by_softmax_alone,
    read_layers,
    whole,
)
from intarsia.engines.guards.kinds import LONGEST_INPUT, Guards, Index, NonZero, Product, ValueGuard
from intarsia.engines.guards.limits import Limits
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network.dtypes import LONG
from intarsia.network.ops import KEEPS_VALUES

# Inputs of these are looked at before the engine runs.
LOOKED_AT = frozenset({ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64})
# A tensor is watched by the sum of its magnitudes, which is one cheap layer; activations stay far below.
CALM = 2.0**36
# Beyond this the next layer might overflow.
HIGH = 2.0**120
HIGHISH = 2.0**80  # the square of this overflows
_HANDED_ON = KEEPS_VALUES | {"Cast"}
# Kernels that read or write wherever an index points; of integers in a line, OpenVINO's Gather does, too.
_UNSAFE = frozenset({"GatherElements", "GatherND", "ScatterElements", "ScatterND"})


def plan_guards(net: Network, limits: Limits, *, floats: bool = True) -> Guards:
    """The guards a network needs; EngineError if no guard would help. Without `floats`, of integers alone."""
    planner = _Planner(net, limits, floats)
    reason = merged_out_of_range(planner.layers) if floats else None
    if reason is not None:
        raise EngineError(f"{reason}; {limits.engine} merges them")
    return planner.run()


class _Planner:
    """One pass in order: values that a layer treats wrongly get guards, and are excluded from there on."""

    def __init__(self, net: Network, limits: Limits, floats: bool) -> None:
        self.net = net
        self.limits = limits
        self.guards = Guards()
        self.known = {tensor.value: whole(tensor.dtype) for tensor in net.get_inputs()}
        self.layers = read_layers(net)
        self.places = {layer: place for place, layer in enumerate(self.layers)}
        self.scores = read_by_softmax_alone(self.layers, net)
        self.last_read = {
            t.value: place
            for place, layer in enumerate(self.layers)
            for t in layer.get_inputs()
            if t is not None
        }
        self.wanted = _wanted(self.layers, limits) if floats else set()
        divides = floats and limits.by_reciprocals and any(map(divides_by_floats, self.layers))
        self.floats = bool(self.wanted) or divides
        self.symbols = {size for t in net.get_inputs() for size in t.shape if isinstance(size, str)}

    def run(self) -> Guards:
        for layer in self.layers:
            if not self.floats and not _has_long(layer):
                continue
            self.guard_floats(layer)
            self.guard_divisors(layer)
            self.guard_indices(layer)
            self.guard_integers(layer)
            ranges = self.bound(layer, self.results(layer))
            ranges = self.guard_results(layer, ranges)
            self.known.update(zip((t.value for t in layer.get_outputs()), ranges, strict=True))
            if layer.kind in ("Shape", "Size") or self.is_of_sizes(layer):
                self.guards.sizes.update(t.name for t in layer.get_outputs())
        return self.guards

    def results(self, layer: Layer, bounded: dict[Tensor, Interval] | None = None) -> list[Interval]:
        instead = bounded or {}
        operands = [
            None if tensor is None or is_weight(layer, tensor) else instead.get(tensor) or self.range(tensor)
            for tensor in layer.get_inputs()
        ]
        ranges = layer_ranges(layer, operands)
        if layer.kind == "Shape" and self.is_input_size(layer):
            ranges = [ranges[0].cut(Interval(0, LONGEST_INPUT))] if ranges[0].high > LONGEST_INPUT else ranges
        return ranges

    def range(self, tensor: Tensor) -> Interval:
        # Weights are looked at only where floats matter, for that takes time.
        if not self.floats and tensor.dtype not in LONG:
            return whole(tensor.dtype)
        return range_of(tensor, self.known)

    def is_of_sizes(self, layer: Layer) -> bool:
        inputs = [t for t in layer.get_inputs() if t is not None]
        return all(t.constant is not None or t.name in self.guards.sizes for t in inputs)

    def is_input_size(self, layer: Layer) -> bool:
        """Whether every size that varies is that of an input, which is checked at the call."""
        x = layer.get_inputs(0)[0]
        assert x is not None
        return all(isinstance(size, int) or size in self.symbols for size in x.shape)

    def guard_floats(self, layer: Layer) -> None:
        """Ensure that no NaN reaches a kernel that would lose it."""
        if not self.floats:
            return
        self.guards.others += self.limits.others(layer)
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is None or tensor.dtype not in dtypes.FLOATS:
                continue
            allowed = self.limits.allowed(layer, index)
            if allowed is not None:
                self.require(layer, tensor, allowed)

    def guard_divisors(self, layer: Layer) -> None:
        """Find divisions whose divisor has no reciprocal, where the engine multiplies by it."""
        if not self.floats or not self.limits.by_reciprocals or not divides_by_floats(layer):
            return
        divisor = layer.get_inputs(1)[0]
        assert divisor is not None
        if not may_be_denormal(divisor, self.range(divisor)):
            return
        if divisor.constant is not None:  # factors that are constants are multiplied, and overflow again
            raise EngineError(f"a constant divisor is denormal; {self.limits.engine} has no reciprocal of it")
        self.guards.divided.append(layer.get_outputs(0)[0].name)

    def bound(self, layer: Layer, ranges: list[Interval]) -> list[Interval]:
        """Guard a layer's operands if it could make NaN or overflow before a kernel that loses NaN."""
        outputs = layer.get_outputs()
        if layer.kind in _HANDED_ON or not self.exceeds(outputs, ranges, self.is_high(layer)):
            return ranges
        instead = {
            tensor: self.range(tensor).cut(self.calm(tensor))
            for tensor in layer.get_inputs()
            if tensor is not None and self.can_be_bounded(tensor)
        }
        bounded = self.results(layer, instead) if instead else ranges
        if self.exceeds(outputs, bounded, any(tensor.value in self.scores for tensor in instead)):
            return ranges
        # What later layers read besides, as residuals, would soon be too high as well.
        later = [Tensor.of(value) for value in self.read_later(layer)]
        for tensor in dict.fromkeys(
            [*instead, *(t for t in later if self.can_be_bounded(t) and self.range(t).reach > HIGHISH)]
        ):
            calm = self.calm(tensor)
            self.guards.others.append(ValueGuard(tensor.name, calm.low, calm.high, total=calm.is_finite))
            self.known[tensor.value] = self.range(tensor).cut(calm)
        return bounded

    def read_later(self, layer: Layer) -> list[ir.Value]:
        """The known values that a later layer reads."""
        now = self.places[layer]
        return [value for value in self.known if value in self.wanted and self.last_read.get(value, -1) > now]

    def is_high(self, layer: Layer) -> bool:
        """Whether an operand is already so large that a guard of this layer gains nothing."""
        floats = [t for t in layer.get_inputs() if t is not None and t.dtype in dtypes.FLOATS]
        return any(t.constant is None and self.range(t).reach > HIGH for t in floats)

    def exceeds(self, outputs: Sequence[Tensor], ranges: Sequence[Interval], may_be_high: bool) -> bool:
        """Whether results may be NaN, or so large that later results may be."""
        for tensor, interval in zip(outputs, ranges, strict=True):
            if tensor.value not in self.wanted:
                continue
            rises = interval.reach > HIGH and tensor.dtype != ir.DataType.FLOAT16
            if interval.nan or (rises and not may_be_high):
                return True
        return False

    def can_be_bounded(self, tensor: Tensor) -> bool:
        if tensor.dtype not in dtypes.FLOATS or tensor.constant is not None:
            return False
        parent = tensor.get_parent()
        # Weights of attention are large and fused with what follows; NaN stays visible in its result.
        if parent is not None and parent.kind == "Softmax":
            return False
        return not self.range(tensor).within(self.calm(tensor))

    def calm(self, tensor: Tensor) -> Interval:
        """Numbers of moderate size. Masks hide scores by minus infinity, or by the least number, as in T5."""
        return Interval(-math.inf if tensor.value in self.scores else -CALM, CALM)

    def guard_indices(self, layer: Layer) -> None:
        axes = self.limits.index_axes(layer)
        if axes is None:
            return
        data, indices = layer.get_inputs(0, 1)
        assert data is not None and indices is not None
        sizes = [data.shape[axis] for axis in axes]
        known = [size for size in sizes if isinstance(size, int)]
        if indices.constant is not None or 0 in known:
            return
        guard = Index(indices.name, data.name, tuple(axes))
        is_unsafe = layer.kind in _UNSAFE or (layer.kind == "Gather" and data.ndim == 1)
        if is_unsafe:  # even if a guard rules it out: that is looked at when the layer has run
            self.guards.held[layer.get_outputs(0)[0].name] = guard
        if len(known) == len(sizes) and self.range(indices).within(_indices(min(known))):
            return
        if max(known, default=0) > LONGEST_INPUT:
            raise EngineError(
                f"{layer.kind} into {max(known)} elements: {self.limits.engine} does not check such indices"
            )
        if len(sizes) == len(known) == 1:
            source = _never_negative(indices)
            if source is None:
                self.require(layer, indices, _indices(known[0]))
            else:
                inside = Interval(0, known[0] - 1)
                self.require(layer, source, inside)
                self.known[indices.value] = inside
            return
        self.guards.others.append(guard)
        if known and len(known) == len(sizes):
            self.known[indices.value] = self.range(indices).cut(_indices(max(known)))

    def guard_integers(self, layer: Layer) -> None:
        """Ensure that integers are small enough for the layer's kernel to be correct."""
        limit = self.limits.integers(layer)
        if limit is None:
            return
        for tensor in layer.get_inputs():
            if tensor is not None and tensor.dtype in LONG:
                self.require(layer, tensor, limit)
        if layer.kind in ("Div", "Mod"):
            divisor = layer.get_inputs(1)[0]
            assert divisor is not None
            if divisor.dtype in dtypes.INTEGERS and divisor.constant is None and self.range(divisor).has_zero:
                self.guards.others.append(NonZero(divisor.name))

    def guard_results(self, layer: Layer, ranges: list[Interval]) -> list[Interval]:
        """Ensure that the layer's integer results stay in the range in which it is correct."""
        limit = self.limits.integers(layer)
        outputs = layer.get_outputs()
        if limit is None or layer.kind in ("ArgMax", "ArgMin") or (layer.kind == "Cast" and not self.floats):
            return ranges  # what floats are cast is watched with the floats
        if _fits(outputs, ranges, limit):
            return ranges
        operands = [t for t in layer.get_inputs() if t is not None and t.dtype in LONG and t.constant is None]
        if layer.kind == "Mul" and len(operands) == 2:
            self.guards.others.append(Product(operands[0].name, operands[1].name, limit.high / 2))
            return [ranges[0].cut(Interval(-limit.high, limit.high))]
        if layer.kind in ("CumSum", "ReduceSum") and operands:
            self.guards.others.append(ValueGuard(operands[0].name, 0, limit.high / 2, total=True))
            return [ranges[0].cut(Interval(-limit.high, limit.high))]
        for bits in (30, 28, 26, 24, 23, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 1, 0):
            small = Interval(-(2**bits), 2**bits)
            less = self.results(layer, {t: self.range(t).cut(small) for t in operands})
            if operands and _fits(outputs, less, limit):
                for tensor in operands:
                    self.require(layer, tensor, small)
                return less
        raise EngineError(
            f"{layer.kind} may make integers from {ranges[0].low} to {ranges[0].high};"
            f" {self.limits.engine} is correct up to {limit.high}"
        )

    def require(self, layer: Layer, tensor: Tensor, allowed: Interval) -> None:
        """Keep a tensor inside an interval from here on, by a guard if that is not known."""
        interval = self.range(tensor)
        if interval.within(allowed) or 0 in tensor.shape:
            return
        if tensor.constant is not None:
            if layer.kind == "Slice":
                return  # a position that means "to the end"
            raise EngineError(
                f"a constant of {layer.kind} holds {_values(interval)};"
                f" {self.limits.engine} is correct from {allowed.low} to {allowed.high}"
            )
        room = _roomy(allowed) if tensor.dtype in LONG else allowed
        chain = _chain(tensor) if tensor.dtype in LONG else [tensor]
        source = chain[-1]
        guard = self.guards.ranges.get(source.value)
        low, high = (room.low, room.high) if guard is None else (guard.low, guard.high)
        self.guards.ranges[source.value] = ValueGuard(source.name, max(low, room.low), min(high, room.high))
        for link in chain:
            self.known[link.value] = self.range(link).cut(room)


def _has_long(layer: Layer) -> bool:
    return any(t is not None and t.dtype in LONG for t in (*layer.get_inputs(), *layer.get_outputs()))


def _roomy(allowed: Interval) -> Interval:
    """The allowed limit for a kernel: less than its own, so that sums stay below it as well."""
    if allowed.high == 2**31 - 1:
        return Interval(-(2**30), 2**30)
    return Interval(-(2**22), 2**22) if allowed.high == 2**24 else allowed


def _never_negative(indices: Tensor) -> Tensor | None:
    """The indices whose negative values are moved out of range, if these are such indices."""
    choice = indices.get_parent()
    if choice is None or choice.kind != "Where":
        return None
    condition, _, source = choice.get_inputs()
    below = None if condition is None else condition.get_parent()
    if source is None or below is None or below.kind != "Less":
        return None
    compared, zero = below.get_inputs()
    is_zero = zero is not None and zero.constant is not None and not zero.constant.any()
    return source if compared == source and is_zero else None


def _indices(size: int) -> Interval:
    return Interval(-size, size - 1)


def _fits(tensors: Sequence[Tensor], intervals: Sequence[Interval], limit: Interval) -> bool:
    return all(
        tensor.dtype not in LONG or interval.within(limit)
        for tensor, interval in zip(tensors, intervals, strict=True)
    )


def _values(interval: Interval) -> str:
    if interval.nan:
        return "NaN"
    return str(interval.low) if interval.low == interval.high else f"{interval.low} to {interval.high}"


def _chain(tensor: Tensor) -> list[Tensor]:
    """A tensor, and the tensors before it that hold the same elements, back to their origin."""
    chain = [tensor]
    while True:
        parent = chain[-1].get_parent()
        if parent is None or parent.kind not in _HANDED_ON:
            return chain
        source = parent.get_inputs(0)[0]
        if source is None or source.dtype not in LONG or source.constant is not None:
            return chain
        chain.append(source)


def _wanted(layers: Sequence[Layer], limits: Limits) -> set[ir.Value]:
    """The floats that may reach a kernel that loses NaN."""
    wanted: set[ir.Value] = set()
    for layer in reversed(layers):
        inputs = [t for t in layer.get_inputs() if t is not None and t.dtype in dtypes.FLOATS]
        minds = bool(limits.others(layer)) or any(
            limits.allowed(layer, index) is not None for index in range(len(layer.get_inputs()))
        )
        if minds or any(t.value in wanted for t in layer.get_outputs()):
            wanted.update(t.value for t in inputs)
    return wanted
