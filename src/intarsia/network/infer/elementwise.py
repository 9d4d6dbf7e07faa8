"""Shape rules of operators that work element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, second
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
    "CumSum",
    "LRN",
    "InstanceNormalization",
    "GroupNormalization",
    "Mish",
    "Swish",
    "MeanVarianceNormalization",
    "ScatterElements",
    "ScatterND",
    "CumProd",
)
def _like_first(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape)]


@infers("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "RMSNormalization")
def _along_axis(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shapes.axis_of(int(attributes.get("axis", -1)), x.ndim)
    return [(x.dtype, x.shape)]


@infers("Trilu")
def _trilu(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shapes.require_rank(x, "what Trilu cuts", 2, 99)
    return [(x.dtype, x.shape)]


@infers("RotaryEmbedding")
def _rotary(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shapes.require_rank(x, "what RotaryEmbedding turns", 3, 4)
    return [(x.dtype, x.shape)]


@infers("ReverseSequence")
def _reverse(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, lengths = first(inputs), second(inputs)
    shapes.require_rank(x, "what ReverseSequence turns", 2, 99)
    shapes.require_rank(lengths, "the lengths of ReverseSequence", 1)
    batch = x.shape[shapes.axis_of(int(attributes.get("batch_axis", 1)), x.ndim)]
    shapes.same(batch, lengths.shape[0], "sequences and lengths of ReverseSequence")
    return [(x.dtype, x.shape)]


@infers("TensorScatter")
def _tensor_scatter(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, update = first(inputs), second(inputs)
    shapes.require_rank(update, "the update of TensorScatter", x.ndim)
    axis = shapes.axis_of(int(attributes.get("axis", -2)), x.ndim)
    for i, (old, new) in enumerate(zip(x.shape, update.shape, strict=True)):
        if i != axis:
            shapes.same(old, new, f"dimension {i} of TensorScatter")
    where = inputs[2] if len(inputs) > 2 else None
    if where is not None:
        shapes.require_rank(where, "the places of TensorScatter", 1)
        shapes.same(where.shape[0], x.shape[0], "the places of TensorScatter")
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
    return [(second(inputs).dtype, _broadcast(inputs))]


@infers("Cast")
def _cast(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType(int(attributes["to"])), first(inputs).shape)]


@infers("CastLike")
def _cast_like(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(second(inputs).dtype, first(inputs).shape)]
