"""Shape rules of operators that work element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers
from intarsia.network.types import Shape
from intarsia.network.value import TypedValue


@infers(
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Cosh",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Log",
    "Neg",
    "PRelu",
    "Reciprocal",
    "Relu",
    "Round",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Not",
    "BitwiseNot",
    "Softmax",
    "LogSoftmax",
    "Hardmax",
    "CumSum",
    "LRN",
    "InstanceNormalization",
    "GroupNormalization",
    "RMSNormalization",
    "Mish",
    "Swish",
    "LpNormalization",
    "MeanVarianceNormalization",
    "Trilu",
    "ScatterElements",
    "ScatterND",
    "TensorScatter",
    "RotaryEmbedding",
    "ReverseSequence",
    "CumProd",
)
def _like_first(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape)]


def _broadcast(inputs: Sequence[TypedValue | None]) -> Shape:
    return shapes.broadcast(*[tensor.shape for tensor in inputs if tensor is not None])


@infers(
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Mod",
    "Max",
    "Min",
    "Mean",
    "Sum",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "BitShift",
)
def _elementwise(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(first(inputs).dtype, _broadcast(inputs))]


@infers("And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def _comparison(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.BOOL, _broadcast(inputs))]


@infers("IsNaN", "IsInf")
def _predicate(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.BOOL, first(inputs).shape)]


@infers("Where")
def _where(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    assert inputs[1] is not None
    return [(inputs[1].dtype, _broadcast(inputs))]


@infers("Cast")
def _cast(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType(int(attributes["to"])), first(inputs).shape)]


@infers("CastLike")
def _cast_like(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    assert inputs[1] is not None
    return [(inputs[1].dtype, first(inputs).shape)]
