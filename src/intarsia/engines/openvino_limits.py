"""What OpenVINO's CPU plugin would take and then answer wrongly, or not survive."""

from __future__ import annotations

import numpy as np
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
        if layer.kind not in _POSITIONS and _is_long(tensor):
            return f"a constant of {layer.kind} holds integers beyond 32 bits, which OpenVINO cuts off"
    return None


def _double(tensor: Tensor) -> str:
    return f"{tensor.name} is float64, which OpenVINO computes in float32"


def _is_long(tensor: Tensor) -> bool:
    if tensor.value.const_value is None or tensor.dtype not in (ir.DataType.INT64, ir.DataType.UINT64):
        return False
    array = tensor.constant
    if array is None or not array.size:
        return False
    limits = np.iinfo(np.int32)
    return bool(array.min() < limits.min or array.max() > limits.max)
