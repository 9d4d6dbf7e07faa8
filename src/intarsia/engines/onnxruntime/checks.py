"""Guards of a network on ONNX Runtime: what its kernels cannot stand, and the layers that look at it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard, Checks, Guards, ValueGuard
from intarsia.engines.guards.planner import FINITE, LOOKED_AT, of_rounded_product
from intarsia.engines.onnxruntime.session import OUTPUT
from intarsia.errors import EngineError
from intarsia.network import Layer, Network
from intarsia.network.ops import NORMALIZES, RECURRENT

# What ONNX Runtime's kernels would answer unlike PyTorch.
#
# Norms are watched for numbers beyond 2**50: the squares overflow and leave 0 where torch has NaN, so a model
# that explodes would look alive.


_NUMBERS = Interval(-math.inf, math.inf)
_ABOVE = Interval(-(2.0**100), math.inf)
# Kernels that pass over NaN, or lose it in what they make.
_LOSES_NAN = RECURRENT
# They leave out elements of weight zero, where torch multiplies them: an infinity becomes a NaN.
_LEAVES_OUT = frozenset({"ConvTranspose"})
# On some processors they compare the lower halves of 64-bit integers.
_EXTREMES = frozenset({"ReduceMax", "ReduceMin"})
_LOWER_HALF = Interval(-(2.0**31), 2.0**31 - 1)
# Of what overflows when it is squared they make 0, torch NaN.
_NORMS = NORMALIZES - {"RMSNormalization"}
_SQUARES_FIT = Interval(-(2.0**50), 2.0**50)
# Kinds of attention, and which of their inputs is the mask that is added.
_MASK = {"Attention": 3, "com.microsoft::MultiHeadAttention": 5}
_SMALL = Interval(-(2.0**16), 2.0**16)


class OnnxRuntimeLimits:
    """Nearly all kernels see all bits of integers here, and check indices."""

    engine = "ONNX Runtime"
    by_reciprocals = False

    def floats(self, layer: Layer, index: int) -> Interval | None:
        kind = layer.kind
        if kind == "MaxPool" and len(layer.get_outputs()) > 1:
            return FINITE  # of a window of minus infinity no place is told
        if kind == "MaxPool":
            return _ABOVE  # of a window of minus infinity it gives the least finite number
        if kind in _LOSES_NAN:
            return _NUMBERS
        if kind == "GridSample":  # places are kept in 32 bits, and rounded: neighbours must not be far apart
            return _SMALL
        if kind in _MASK:  # torch's kernel leaves a row whose scores are NaN or -inf at 0, this one at NaN
            return Interval(-math.inf, 2.0**100) if index == _MASK[kind] else FINITE
        if (kind in _NORMS and index == 0) or (kind == "com.microsoft::SkipLayerNormalization" and index < 2):
            return _SQUARES_FIT
        if kind in _LEAVES_OUT or (kind == "Resize" and layer.attribute("mode", "nearest") != "nearest"):
            return FINITE if index == 0 else None
        return None

    def integers(self, layer: Layer) -> Interval | None:
        return _LOWER_HALF if layer.kind in _EXTREMES else None

    def index_axes(self, layer: Layer) -> None:
        return None

    def others(self, layer: Layer) -> list[AnyGuard]:
        return []


class RoundedProductLimits(OnnxRuntimeLimits):
    """Of kernels that round activations to integers, besides."""

    def floats(self, layer: Layer, index: int) -> Interval | None:
        return of_rounded_product(layer, index) or super().floats(layer, index)


# Guards that are not of inputs: the model computes a number for each, in one more output.


def add_checks(net: Network, model: Any, guards: Guards, *, look_at_inputs: bool) -> Checks:
    """Let the model compute what is not looked at before it runs."""
    inputs = {t.name for t in net.get_inputs() if look_at_inputs and t.dtype in LOOKED_AT}
    types = {value.name: value.dtype for value in _values(net)}
    on_inputs: dict[str, list[ValueGuard]] = {}
    computed: list[AnyGuard] = []
    limits: list[float] = []
    nodes = _Nodes(model.graph)
    numbers = []
    for guard in guards.all():
        if not isinstance(guard, ValueGuard):
            raise EngineError(f"a guard that ONNX Runtime has no layers for: {guard}")
        if guard.tensor in inputs:
            on_inputs.setdefault(guard.tensor, []).append(guard)
            continue
        number, limit = _number(nodes, guard, types[guard.tensor])
        computed.append(guard)
        limits.append(limit)
        numbers.append(number)
    if numbers:
        flat = [nodes.add("Reshape", number, nodes.constant(np.array([1], np.int64))) for number in numbers]
        model.graph.node.append(helper.make_node("Concat", flat, [OUTPUT], axis=0))
        model.graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [len(flat)]))
    return Checks(on_inputs, computed, np.array(limits, dtype=np.float32))


def _values(net: Network) -> list[ir.Value]:
    outputs = [value for layer in net.get_layers() for value in layer.node.outputs]
    return [*(tensor.value for tensor in net.get_inputs()), *outputs]


def _number(nodes: _Nodes, guard: ValueGuard, dtype: ir.DataType | None) -> tuple[str, float]:
    """A number, and the most it may be; NaN is more than anything."""
    x = guard.tensor
    if dtype != ir.DataType.FLOAT:
        x = nodes.add("Cast", x, to=TensorProto.FLOAT)
    open_below = guard.low == -math.inf and guard.high != math.inf  # minus infinity is allowed: it masks
    if guard.high == math.inf and guard.low != -math.inf:  # infinity is allowed, minus infinity is not
        x, open_below, guard = nodes.add("Neg", x), True, ValueGuard(x, -math.inf, -guard.low)
    if not open_below and (guard.total or guard.low == -math.inf or guard.high >= 2.0**50):
        return nodes.add("ReduceL1", x, keepdims=0), guard.high
    size = x if open_below else nodes.add("Abs", x)
    inside = nodes.add("LessOrEqual", size, nodes.constant(np.array(guard.high, np.float32)))
    misses = nodes.add("Cast", nodes.add("Not", inside), to=TensorProto.FLOAT)
    return nodes.add("ReduceMax", misses, keepdims=0), 0.5


class _Nodes:
    """Appends nodes and constants to a model, each under a new name."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._count = 0

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = self._name()
        self._graph.node.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        name = self._name()
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{OUTPUT}_{self._count}"
