"""The layers and the values that MNN treats as PyTorch does, and the layers that detect other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto

from intarsia.engines.guards import appended
from intarsia.engines.guards.appended import AppendedNodes
from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard, Checks, Guards, Product, ValueGuard
from intarsia.engines.guards.limits import FINITE, Limits
from intarsia.engines.guards.planner import LOOKED_AT, plan_guards
from intarsia.engines.mnn.program import CHECKS
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.ops import COMPARES, COUNTS, MOVES_DATA, NORMALIZES

# Which layers MNN runs as PyTorch does, and the forms that its converter reads.
#
# The lists hold what was compared with ONNX Runtime, layer by layer (MNN 3.6.1, x86_64). What is left out is
# either refused by the converter, or wrong: a slice by negative steps ends the process, `ReduceL2` ignores
# its axes, `Softplus` is off by 2 % for large numbers, pools ignore dilations, `Round` rounds halves up,
# `GatherElements` takes negative indices for 0, one-dimensional convolutions have results of another rank.


_MOST_DIMS = 6
_WHOLE = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.BOOL, *_WHOLE})
_LARGEST = 2**31 - 1

Condition = Callable[[Layer], str | None]


def refusal(net: Network) -> str | None:
    """The reason why MNN would run a network differently from PyTorch; None if it would not."""
    for tensor in (*net.get_inputs(), *net.get_outputs()):
        if tensor.dtype not in _TYPES:
            return f"{tensor.name} is of {tensor.dtype.name}, which MNN does not compute with"
    for layer in net.get_layers():
        reason = _layer_refusal(layer)
        if reason is not None:
            return f"{layer.kind}: {reason}"
    try:
        planned(net)
    except EngineError as error:
        return str(error)
    return None


def _layer_refusal(layer: Layer) -> str | None:
    if layer.kind not in CONDITIONS:
        return "it is not among the layers that were compared with PyTorch"
    for tensor in (*layer.get_inputs(), *layer.get_outputs()):
        if tensor is None:
            continue
        if tensor.ndim > _MOST_DIMS:
            return f"{tensor.name} has {tensor.ndim} dimensions; MNN has {_MOST_DIMS}"
        if tensor.constant is None:
            if 0 in tensor.shape:
                return f"{tensor.name} is empty"
            if tensor.dtype != ir.DataType.FLOAT and not _takes(layer.kind, tensor.dtype):
                return f"{tensor.name} is of {tensor.dtype.name}"
        elif tensor.dtype in _WHOLE and layer.kind != "Slice" and _is_wide(tensor):
            return f"{tensor.name} holds integers beyond 32 bits"
    return CONDITIONS[layer.kind](layer)


def _takes(kind: str, dtype: ir.DataType) -> bool:
    return kind in (_BOOLEANS if dtype == ir.DataType.BOOL else _INTEGERS if dtype in _WHOLE else ())


def _is_wide(tensor: Tensor) -> bool:
    array = tensor.constant
    return (
        array is not None and array.size > 0 and bool(abs(array).max() > _LARGEST or array.min() < -_LARGEST)
    )


def _always(layer: Layer) -> str | None:
    return None


def _constant(*places: int) -> Condition:
    """The inputs at these places must be known when the network is built."""

    def condition(layer: Layer) -> str | None:
        inputs = layer.get_inputs()
        for place in places:
            tensor = inputs[place] if place < len(inputs) else None
            if tensor is not None and tensor.constant is None:
                return f"{tensor.name} is not constant"
        return None

    return condition


def _window(layer: Layer) -> str | None:
    """Convolutions and pools over images."""
    x = layer.get_inputs()[0]
    assert x is not None
    if x.ndim != 4:
        return f"a window over {x.ndim - 2} dimensions is not handled"
    if str(layer.attribute("auto_pad", "NOTSET")) != "NOTSET":
        return f"auto_pad={layer.attribute('auto_pad')} is not handled"
    return None


def _convolution(layer: Layer) -> str | None:
    return _window(layer) or _constant(1, 2)(layer)


def _pool(layer: Layer) -> str | None:
    if any(step != 1 for step in layer.attribute("dilations", None) or ()):
        return f"dilations={layer.attribute('dilations')} are ignored"
    if len(layer.get_outputs()) > 1:
        return "the second output, the indices, is not handled"
    return _window(layer)


def _clip(layer: Layer) -> str | None:
    bounds = [None if x is None else x.constant for x in layer.get_inputs()[1:]]
    if len(bounds) == 2 and bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1]:
        return f"bounds from {bounds[0]} down to {bounds[1]} are not handled"  # PyTorch takes the upper one
    return _constant(1, 2)(layer)


def _slice(layer: Layer) -> str | None:
    inputs = layer.get_inputs()
    steps = inputs[4].constant if len(inputs) > 4 and inputs[4] is not None else None
    if steps is not None and (steps < 1).any():
        return f"steps={steps.tolist()} are not handled"
    return _constant(4)(layer)


def _divided(layer: Layer) -> str | None:
    """A division of integers by zero ends the process."""
    x, divisor = layer.get_inputs(0, 1)
    assert x is not None and divisor is not None
    if x.dtype == ir.DataType.FLOAT:
        return None if layer.kind == "Div" else "floats are not handled"
    if divisor.constant is None or not divisor.constant.all():
        return f"{divisor.name} may be 0"
    return None


def _cast(layer: Layer) -> str | None:
    output = layer.get_outputs(0)[0]
    return None if output.dtype in _TYPES else f"to {output.dtype.name} is not handled"


def _compared(layer: Layer) -> str | None:
    result = layer.get_outputs(0)[0]
    if spreads_both(layer) and not all(isinstance(size, int) for size in result.shape):
        return "two operands that are broadcast over varying sizes are not handled"
    return None


def spreads_both(layer: Layer) -> bool:
    """Whether both operands are broadcast against each other: MNN then mixes elements up."""
    result = layer.get_outputs(0)[0]
    operands = [tensor for tensor in layer.get_inputs() if tensor is not None]
    floats = all(tensor.dtype == ir.DataType.FLOAT for tensor in operands)
    return floats and all(tuple(tensor.shape) != tuple(result.shape) for tensor in operands)


def _where(layer: Layer) -> str | None:
    if not spread_choices(layer) or all(isinstance(n, int) for n in layer.get_outputs(0)[0].shape):
        return None
    return "operands that are broadcast over varying sizes are not handled"


def spread_choices(layer: Layer) -> list[int]:
    """The inputs that Where broadcasts over its result: MNN reads them wrongly."""
    result, choices = layer.get_outputs(0)[0], layer.get_inputs()
    return [
        place
        for place, tensor in enumerate(choices)
        if place and tensor is not None and tensor.shape != result.shape and any(n != 1 for n in tensor.shape)
    ]


def _gather(layer: Layer) -> str | None:
    data, indices = layer.get_inputs(0, 1)
    assert data is not None and indices is not None
    size = data.shape[layer.attribute("axis", 0)]
    if indices.constant is None and not (isinstance(size, int) and size <= 2**24):
        return f"indices into {size} elements are not handled"
    return None


def _shaped(layer: Layer) -> str | None:
    return "allowzero=1 is not handled" if layer.attribute("allowzero", 0) else None


def _summed(layer: Layer) -> str | None:
    if layer.attribute("exclusive", 0) or layer.attribute("reverse", 0):
        return "exclusive and reverse are not handled"
    return _constant(1)(layer)


def _one_output(layer: Layer) -> str | None:
    return "only the first output is handled" if len(layer.get_outputs()) > 1 else None


def _statistics(layer: Layer) -> str | None:
    if layer.attribute("training_mode", 0):
        return "training_mode=1 is not handled"
    return _one_output(layer) or _constant(1, 2, 3, 4)(layer)


def _resize(layer: Layer) -> str | None:
    x = layer.get_inputs()[0]
    assert x is not None
    mode, way = layer.attribute("mode", "nearest"), layer.attribute("coordinate_transformation_mode", "")
    if x.ndim != 4 or mode != "linear" or way not in ("half_pixel", "align_corners", "pytorch_half_pixel"):
        return f"mode={mode} by {way or 'half_pixel'} over {x.ndim} dimensions is not handled"
    if layer.attribute("antialias", 0) or layer.attribute("axes", None):
        return "antialias and axes are not handled"
    return _constant(1, 2, 3)(layer)


def _matmul(layer: Layer) -> str | None:
    # A vector ends the process: "double free or corruption".
    ranks = [tensor.ndim for tensor in layer.get_inputs() if tensor is not None]
    return "an operand with one dimension is not handled" if min(ranks) < 2 else None


def _attention(layer: Layer) -> str | None:
    """The attention that `expanded` can write: separate heads, no past, equal numbers of heads."""
    inputs = layer.get_inputs()
    q, k = inputs[0], inputs[1]
    assert q is not None and k is not None
    if q.ndim != 4 or q.shape[1] != k.shape[1] or len(layer.get_outputs()) > 1 or len(inputs) > 4:
        return "only plain attention with as many heads of keys as of queries is handled"
    if layer.attribute("softcap", 0.0):
        return f"softcap={layer.attribute('softcap')} is not handled"
    if layer.attribute("is_causal", 0) and not all(isinstance(x.shape[2], int) for x in (q, k)):
        return "is_causal=1 over varying lengths is not handled"
    return None if isinstance(q.shape[3], int) else "heads of varying width are not handled"


def _kinds(condition: Condition, names: str) -> dict[str, Condition]:
    return dict.fromkeys(names.split(), condition)


CONDITIONS: dict[str, Condition] = {
    **_kinds(_always, "Abs Neg Relu Floor Ceil Sqrt Exp Log Sigmoid Tanh Erf Sin Cos Tan Atan Asin Acos"),
    **_kinds(_always, "Sinh Cosh Asinh Acosh Atanh Reciprocal Softsign HardSigmoid HardSwish LeakyRelu"),
    **_kinds(_always, "Add Sub Mul Max Min Sum Softmax LogSoftmax Gemm Gelu Identity Flatten Sign"),
    **_kinds(_always, "Transpose Concat GlobalAveragePool GlobalMaxPool DepthToSpace SpaceToDepth Expand"),
    **_kinds(_always, "And Or Xor Not Shape Range ConstantOfShape"),
    **dict.fromkeys(COMPARES, _compared),
    **_kinds(_constant(1), "Unsqueeze Squeeze Tile Pow PRelu Split"),
    **_kinds(_constant(1), "ReduceMean ReduceSum ReduceMax ReduceMin Trilu"),
    **_kinds(_constant(1, 2, 3), "Pad"),
    **_kinds(_convolution, "Conv ConvTranspose"),
    **_kinds(_divided, "Div Mod"),
    **_kinds(_pool, "MaxPool AveragePool"),
    **_kinds(_statistics, "BatchNormalization InstanceNormalization"),
    **_kinds(_one_output, "LayerNormalization"),
    "Attention": _attention,
    "Cast": _cast,
    "Clip": _clip,
    "CumSum": _summed,
    "Gather": _gather,
    "MatMul": _matmul,
    "Reshape": _shaped,
    "Resize": _resize,
    "Slice": _slice,
    "Where": _where,
}
_MOVES = (
    "Identity Transpose Concat Reshape Unsqueeze Squeeze Expand Tile Gather Slice Split Flatten Where Cast"
)
_BOOLEANS = COMPARES | frozenset(f"{_MOVES} And Or Xor Not Attention".split())
_INTEGERS = COMPARES | frozenset(
    f"{_MOVES} Add Sub Mul Div Mod Max Min Neg Abs Sign CumSum ReduceSum ReduceMax ReduceMin Shape Range"
    " ConstantOfShape Clip".split()
)


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


class MnnLimits(Limits):
    """The values that MNN's kernels treat as PyTorch does."""

    engine = "MNN"

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
