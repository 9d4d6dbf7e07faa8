"""What OpenVINO's CPU plugin would take and then answer wrongly, or not survive."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.network import Layer, Network, Tensor

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
# Integers go through float32 in these layers, so that only those of 24 bits are exact.
IN_FLOAT = frozenset({"Equal", "Mod", "Pad", "Pow", "ReduceMax", "ReduceMin", "ReduceSum"})
# The extremes of an integer type are common here, as the start of a search for the largest or smallest.
_SEARCHES = frozenset({"ReduceMax", "ReduceMin"})
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64})
# Their integer operands are positions, which may well mean "to the end".
_POSITIONS = frozenset({"Slice"})


def refuses(net: Network) -> str | None:
    """Why a network must not be given to OpenVINO; None if it may."""
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
    for made in outputs:
        if made.value.dtype == ir.DataType.DOUBLE:
            return _double(made)
    touched = [tensor for tensor in layer.get_inputs() if tensor is not None]
    for tensor in (*touched, *outputs):
        if layer.kind not in _TAKES_EMPTY and tensor.value.shape is not None and 0 in tensor.shape:
            return (
                f"{layer.kind} of the empty tensor {tensor.name}{list(tensor.shape)} is not safe in OpenVINO"
            )
        if layer.kind not in _POSITIONS and _is_beyond(tensor, 2**31):
            return f"a constant of {layer.kind} holds integers beyond 32 bits, which OpenVINO cuts off"
        if layer.kind in IN_FLOAT and _is_beyond(tensor, 2**24):
            return f"a constant of {layer.kind} is beyond 24 bits, and OpenVINO computes it in float32"
    if layer.kind in _SEARCHES and touched[0].dtype in _INTEGERS and not _counts_truth(touched[0]):
        return f"{layer.kind} of integers, which OpenVINO computes in float32"
    return None


def _counts_truth(tensor: Tensor) -> bool:
    """Whether integers are zeros and ones made of booleans."""
    parent = tensor.get_parent()
    source = parent.get_inputs(0)[0] if parent is not None and parent.kind == "Cast" else None
    return source is not None and source.dtype == ir.DataType.BOOL


def _double(tensor: Tensor) -> str:
    return f"{tensor.name} is float64, which OpenVINO computes in float32"


def _is_beyond(tensor: Tensor, limit: int) -> bool:
    if tensor.value.const_value is None or tensor.dtype not in _INTEGERS:
        return False
    array = tensor.constant
    return array is not None and bool(array.size) and bool(array.min() < -limit or array.max() >= limit)
