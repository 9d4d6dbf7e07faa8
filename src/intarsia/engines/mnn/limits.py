"""Where MNN's kernels differ from PyTorch, and the layers that detect it while a network runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto

from intarsia.engines.guards import appended
from intarsia.engines.guards.appended import AppendedNodes
from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard, Checks, Guards, Product, ValueGuard
from intarsia.engines.guards.planner import FINITE, LOOKED_AT, plan_guards
from intarsia.engines.mnn.program import CHECKS
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.ops import COMPARES, COUNTS, MOVES_DATA, NORMALIZES

# Compared with ONNX Runtime on MNN 3.6.1, x86_64, fifteen elements at a time: its kernels take some by
# vectors and the rest one by one.
#
# Integers are of 32 bits. Max, Min, Mul, Abs and Clip compute them as float32, by vectors; a division by zero
# ends the process. Gather reads another row for an index out of range.


_WIDE = Interval(-(2**31) + 1, 2**31 - 1)  # the least integer divided by -1 ends the process
_NARROW = Interval(-(2**24), 2**24)
_NUMBERS = Interval(-math.inf, math.inf)
_NO_MINUS_INFINITY = Interval(-float(np.finfo(np.float32).max), 2.0**100)
_BELOW = Interval(-math.inf, 2.0**100)
_SQUARES_FIT = Interval(-(2.0**50), 2.0**50)
_EXP = Interval(-math.inf, 80.0)  # of what is larger it makes 6e37, not infinity
# Kernels that compute integers with all their 32 bits.
_EXACT = (MOVES_DATA - {"Pad", "Trilu"}) | COMPARES | COUNTS | frozenset(
    {
        "Add", "Sub", "Neg", "Cast", "Range", "ConstantOfShape",
        "ReduceMax", "ReduceMin", "ReduceSum", "CumSum",
    }
)  # fmt: skip
# Kernels that hand NaN on; Relu makes 0 of it, Sigmoid and Tanh 1, comparisons take it for a number.
_HANDS_NAN_ON = (MOVES_DATA - {"Pad", "Trilu"}) | frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Floor", "Ceil", "Log", "Erf", "Sin", "Cos", "Tan", "Conv",
        "MatMul", "Gemm", "ReduceSum", "ReduceMean", "AveragePool", "GlobalAveragePool", "BatchNormalization",
        "Sum", "ConvTranspose", "Shape",
    }
)  # fmt: skip


class MnnLimits:
    """The values that MNN's kernels treat as PyTorch does."""

    engine = "MNN"
    by_reciprocals = False

    def floats(self, layer: Layer, index: int) -> Interval | None:
        kind = layer.kind
        if kind == "Cast":
            output = layer.get_outputs(0)[0].dtype
            return Interval(-(2.0**30), 2.0**30) if output in (ir.DataType.INT32, ir.DataType.INT64) else None
        if kind == "Exp":
            return _EXP
        if kind == "Attention":  # of a row that is masked altogether it makes 0, as torch does
            return _BELOW if index == 3 else FINITE
        if kind in ("Softmax", "LogSoftmax"):  # of minus infinity alone it makes 0, torch NaN
            return _NO_MINUS_INFINITY
        if kind in NORMALIZES:
            return _SQUARES_FIT
        return None if kind in _HANDS_NAN_ON else _NUMBERS

    def integers(self, layer: Layer) -> Interval:
        return _WIDE if layer.kind in _EXACT else _NARROW

    def index_axes(self, layer: Layer) -> list[int] | None:
        return [layer.attribute("axis", 0)] if layer.kind == "Gather" else None

    def others(self, layer: Layer) -> list[AnyGuard]:
        return []


def planned(net: Network) -> Guards:
    """The guards of a network; EngineError if MNN cannot check one of them."""
    guards = plan_guards(net, MnnLimits())
    for guard in guards.all():
        if not isinstance(guard, ValueGuard | Product):
            raise EngineError(f"{guard}, and MNN has no layers to check it")
    return guards


def add_checks(net: Network, model: Any, guards: Guards) -> Checks:
    """Let the model compute the guards that are not checked before it runs."""
    inputs = {tensor.name for tensor in net.get_inputs() if tensor.dtype in LOOKED_AT}
    tensors = {tensor.name: tensor for layer in net.get_layers() for tensor in layer.get_outputs()}
    return appended.add_checks(model, CHECKS, guards, inputs, partial(_number, tensors))


def _number(tensors: Mapping[str, Tensor], nodes: AppendedNodes, guard: AnyGuard) -> tuple[str, float]:
    """A number, and the most it may be; NaN is more than anything.

    MNN's Abs, Max and Min lose NaN. A product and a sum keep it, and `GreaterOrEqual` of it is false.
    """
    if isinstance(guard, Product):
        one, other = (nodes.add("Cast", name, to=TensorProto.FLOAT) for name in guard.tensors)
        return nodes.add("ReduceMax", nodes.add("Abs", nodes.add("Mul", one, other)), keepdims=0), guard.high
    assert isinstance(guard, ValueGuard)
    x, is_float = guard.tensor, tensors[guard.tensor].dtype == ir.DataType.FLOAT
    if is_float and (guard.total or (guard.low == -math.inf and guard.high == math.inf)):
        high = min(guard.high, 2.0**60)
        return nodes.add("ReduceSum", nodes.add("Mul", x, x), keepdims=0), high * high
    if guard.total:
        size = nodes.add("Abs", nodes.add("Cast", x, to=TensorProto.FLOAT))
        return nodes.add("ReduceSum", size, keepdims=0), guard.high
    dtype = np.float32 if is_float else np.int64
    inside = nodes.add("GreaterOrEqual", _bound(guard.high, dtype), x)
    if guard.low != -math.inf:
        above = nodes.add("GreaterOrEqual", x, _bound(guard.low, dtype))
        inside = nodes.add("And", inside, above)
    misses = nodes.add("Cast", nodes.add("Not", inside), to=TensorProto.FLOAT)
    return nodes.add("ReduceMax", misses, keepdims=0), 0.5


def _bound(number: float, dtype: type) -> np.ndarray[Any, Any]:
    return np.array(number if dtype is np.float32 else int(number), dtype)
