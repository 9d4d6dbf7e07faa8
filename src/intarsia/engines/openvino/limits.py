"""Networks that OpenVINO's CPU plugin accepts, but computes wrongly or crashes on.

Each rule is a kernel of OpenVINO 2026.4, compared with torch 2.13 layer by layer. An exact layer in place of
every such kernel would cost every model its fusions, for values that do not come: so they are watched.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from intarsia.cache.machine import is_arm
from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.kinds import AnyGuard, Quotient
from intarsia.engines.guards.limits import FINITE, Limits
from intarsia.engines.openvino.core import rounds_to_bfloat16
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network.ops import COUNTS, MOVES_DATA, NORMALIZES, RECURRENT

# Layers seen to treat empty tensors rightly; others may leave their result unset, and Gather crashes.
# fmt: off
_TAKES_EMPTY = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd",
        "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Clip", "Concat", "ConstantOfShape",
        "Cos", "Cosh", "CumSum", "Div", "Equal", "Erf", "Exp", "Expand", "Floor", "Greater",
        "GreaterOrEqual", "HardSigmoid", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
        "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pad", "Pow",
        "Reciprocal", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "ScatterElements",
        "ScatterND", "Shape", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Slice", "Softmax", "Sqrt",
        "Squeeze", "Sub", "Tan", "Tanh", "Transpose", "Unsqueeze", "Where", "Xor",
    }
)
# fmt: on
# Layers seen to hand NaN on as torch does: alone, after another of their kind, after a convolution and
# after a product of matrices. All others are not shown any.
# fmt: off
HANDS_NAN_ON = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "AveragePool", "BatchNormalization",
        "Ceil", "Concat", "Conv", "ConvTranspose", "Cos", "Cosh", "CumSum", "Div", "Elu", "Equal", "Erf",
        "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm",
        "GlobalAveragePool", "Greater", "GreaterOrEqual", "HardSwish", "Identity", "IsInf", "IsNaN",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "MatMul", "Mish", "Mod", "Mul",
        "Neg", "PRelu", "Pad", "Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceProd", "ReduceSum",
        "ReduceSumSquare", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sigmoid", "Sin",
        "Sinh", "Size", "Slice", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Tan", "Tanh",
        "Tile", "Transpose", "Unsqueeze", "Where",
    }
)
# Kernels that move integers of 32 bits, or compute in them.
# Four that move elsewhere are taken to compute in float32 here, as all others are.
_MOVES = (MOVES_DATA - {"Pad", "ReverseSequence", "Trilu", "Where"}) | COUNTS | frozenset(
    {"Cast", "ConstantOfShape", "CumSum", "MaxPool", "Range", "Unique"}
)
# fmt: on
# These compute in 32 bits, unless they are fused with one that computes in float32.
_BITWISE = frozenset({"BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"})
_ARITHMETIC = frozenset({"Abs", "Add", "Max", "Min", "Mul", "Neg", "Sub"})
_NATIVE = _BITWISE if is_arm() else _BITWISE | _ARITHMETIC
# On ARM these look at integers as float32.
_EXTREMES = frozenset({"ArgMax", "ArgMin", "MaxPool", "TopK"} if is_arm() else ())
# They multiply numbers with each other, or with themselves: of large ones not even an infinity is left.
_SQUARES = NORMALIZES | RECURRENT | {"Attention"}
_WIDE = Interval(-(2**31), 2**31 - 1)
_HAS_NEGATIVE = Interval(-(2**31) + 1, 2**31 - 1)  # as a truth value, -2**31 is taken for zero
_NARROW = Interval(-(2**24), 2**24)  # what float32 holds exactly
# What shorter floats hold exactly: to float16 OpenVINO does not round, to bfloat16 it cuts off.
_HELD = {ir.DataType.FLOAT16: Interval(-(2**11), 2**11), ir.DataType.BFLOAT16: Interval(-(2**8), 2**8)}
_SHORTS = frozenset({ir.DataType.INT16, ir.DataType.UINT16})
_ANY_NUMBER = Interval(-math.inf, math.inf)


def refuses(net: Network) -> str | None:
    """Why a network must not run on OpenVINO; None if it may."""
    for tensor in net.get_inputs():
        if tensor.value.dtype == ir.DataType.DOUBLE:
            return _double(tensor)
    for layer in net.get_layers():
        reason = _refuses(layer)
        if reason is not None:
            return reason
    return None


def _refuses(layer: Layer) -> str | None:
    outputs = layer.get_outputs()
    for result in outputs:
        if result.value.dtype == ir.DataType.DOUBLE:
            return _double(result)
    if layer.kind == "Cast" and outputs[0].dtype in _HELD:
        source = layer.get_inputs(0)[0]
        if source is not None and source.dtype in _SHORTS:  # longer ones are watched
            return f"{outputs[0].name} rounds {source.dtype.name}, which OpenVINO does differently"
    reason = _refuses_on_this_processor(layer)
    if reason is not None:
        return reason
    touched = [tensor for tensor in layer.get_inputs() if tensor is not None]
    for tensor in (*touched, *outputs):
        if layer.kind not in _TAKES_EMPTY and tensor.value.shape is not None and 0 in tensor.shape:
            return (
                f"{layer.kind} of the empty tensor {tensor.name}{list(tensor.shape)} is not safe in OpenVINO"
            )
    return None


def _refuses_on_this_processor(layer: Layer) -> str | None:
    output = layer.get_outputs(0)[0]
    if layer.kind == "ConvTranspose" and is_arm() and not _is_constant(layer.get_inputs(1)[0]):
        return f"{output.name} is a transposed convolution by weights that OpenVINO reads only once on ARM"
    if output.dtype != ir.DataType.BFLOAT16 or rounds_to_bfloat16():
        return None
    source = layer.get_inputs(0)[0]
    moved = layer.kind in _MOVES and (
        layer.kind != "Cast" or source is None or source.dtype not in dtypes.FLOATS
    )
    return None if moved else f"{output.name} is rounded to bfloat16, wrongly by OpenVINO on this processor"


class OpenVINOLimits(Limits):
    """The values that OpenVINO's kernels treat as PyTorch does."""

    engine = "OpenVINO"
    by_reciprocals = True

    def __init__(self, net: Network, rounded: bool = False) -> None:
        super().__init__(rounded)
        self._narrow = _narrow_layers(net)

    def floats(self, layer: Layer, index: int) -> Interval | None:
        kind, output = layer.kind, layer.get_outputs(0)[0].dtype
        if kind == "Cast":
            if output in dtypes.INTEGERS:
                return Interval(-(2.0**30), 2.0**30)
            return _ANY_NUMBER if output == ir.DataType.BOOL else None
        if kind == "Conv" and index == 1 and any(layer.attribute("pads", ())):
            return FINITE  # torch multiplies what is padded too: infinity by 0
        if kind == "ConvTranspose" and index == 1 and not _is_finite(layer, index):
            return FINITE  # torch adds up what it then cuts off, and zeros between
        if kind == "BatchNormalization" and index > 0 and not _is_finite(layer, index):
            return FINITE  # made one factor and one summand: infinity less infinity
        if kind == "GridSample":  # places are rounded on the way: neighbours must not be far apart
            return Interval(-(2.0**16), 2.0**16)
        if (
            kind == "Gelu"
            and output == ir.DataType.FLOAT16
            and layer.attribute("approximate", "none") == "none"
        ):
            return Interval(-math.inf, 2.0**100)  # of infinity NaN, as torch in longer floats alone
        if kind in HANDS_NAN_ON:
            return None
        if kind == "MaxPool" and len(layer.get_outputs()) > 1:
            return FINITE  # a window of minus infinity gives no place
        if kind == "MaxPool":
            return Interval(-(2.0**100), math.inf)  # of such a window it gives the least finite number
        if kind in ("Softmax", "LogSoftmax") or (kind == "Attention" and index == 3):
            return Interval(-math.inf, 2.0**100)  # minus infinity masks
        if kind == "Resize" and layer.attribute("mode", "nearest") != "nearest":
            return FINITE if index == 0 else _ANY_NUMBER  # torch: infinity by weight 0
        if kind in _SQUARES:
            return Interval(-(2.0**50), 2.0**50)
        return _ANY_NUMBER

    def integers(self, layer: Layer) -> Interval:
        kind = layer.kind
        if kind == "Cast" and layer.get_outputs(0)[0].dtype == ir.DataType.BOOL:
            return _HAS_NEGATIVE
        if kind == "Cast" and layer.get_outputs(0)[0].dtype in _HELD:
            return _HELD[layer.get_outputs(0)[0].dtype]
        return _WIDE if _is_moved(layer) or (kind in _NATIVE and layer not in self._narrow) else _NARROW

    def index_axes(self, layer: Layer) -> list[int] | None:
        """The axes that a layer's second input points into; kernels read there unchecked."""
        if layer.kind in ("Gather", "GatherElements", "ScatterElements"):
            return [layer.attribute("axis", 0)]
        if layer.kind not in ("GatherND", "ScatterND"):
            return None
        indices = layer.get_inputs(1)[0]
        assert indices is not None
        first, depth = layer.attribute("batch_dims", 0), indices.shape[-1]
        if not isinstance(depth, int):
            raise EngineError(f"{layer.kind} by indices with an unknown number of coordinates is not handled")
        return list(range(first, first + depth))

    def others(self, layer: Layer) -> list[AnyGuard]:
        if layer.kind != "Mod" or layer.get_outputs(0)[0].dtype not in dtypes.FLOATS:
            return []
        a, b = layer.get_inputs()
        assert a is not None and b is not None
        return [Quotient(a.name, b.name)]


def _is_moved(layer: Layer) -> bool:
    """Whether a layer returns integers unchanged."""
    if layer.kind not in _EXTREMES:
        return layer.kind in _MOVES
    source = layer.get_inputs(0)[0]
    return source is None or source.dtype not in dtypes.LONG


def _is_constant(source: Tensor | None) -> bool:
    """Whether a tensor is known when a network is made, or made of such by layers that move."""
    if source is None or source.constant is not None:
        return source is not None
    parent = source.get_parent()
    return parent is not None and parent.kind in _MOVES and all(map(_is_constant, parent.get_inputs()))


def _is_finite(layer: Layer, index: int) -> bool:
    """Whether an input is known to hold only numbers of moderate size, as weights do."""
    source = layer.get_inputs(index)[0]
    return (
        source is not None and source.constant is not None and bool((abs(source.constant) < 2.0**100).all())
    )


def _narrow_layers(net: Network) -> set[Layer]:
    """The layers that may be fused with one that computes integers in float32."""
    near: dict[Layer, set[Layer]] = {}
    open_: list[Layer] = []
    for layer in net.get_layers():
        if not any(
            t is not None and t.dtype in dtypes.LONG for t in (*layer.get_inputs(), *layer.get_outputs())
        ):
            continue
        neighbours = near.setdefault(layer, set())
        for tensor in layer.get_inputs():
            parent = None if tensor is None or tensor.dtype not in dtypes.LONG else tensor.get_parent()
            if parent is not None:
                neighbours.add(parent)
                near.setdefault(parent, set()).add(layer)
        if layer.kind not in _NATIVE and not _is_moved(layer):
            open_.append(layer)
    results = set(open_)
    while open_:
        for neighbour in near[open_.pop()] - results:
            results.add(neighbour)
            open_.append(neighbour)
    return results


def _double(tensor: Tensor) -> str:
    return f"{tensor.name} is float64, which OpenVINO computes in float32"
