"""What each operator makes: dtype and shape of its outputs, from its inputs and attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network import shapes
from intarsia.network.network import Dim, Shape, Tensor

Made = list[tuple[ir.DataType, Shape]]
Rule = Callable[[Sequence[Tensor | None], Mapping[str, Any], int], Made]

_RULES: dict[tuple[str, str], Rule] = {}


def infers(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the shape rule of operators; an opaque layer gets one the same way."""

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            _RULES[domain, op_type] = rule
        return rule

    return register


def infer(
    domain: str, op_type: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int
) -> Made:
    """Dtype and shape of every output."""
    rule = _RULES.get((domain, op_type))
    if rule is None:
        raise NetworkError(f"no shape rule for {domain + '::' if domain else ''}{op_type}")
    return rule(inputs, attributes, outputs)


def has_rule(domain: str, op_type: str) -> bool:
    return (domain, op_type) in _RULES


def known_ints(tensor: Tensor | None) -> list[int] | None:
    """The content of an integer tensor, if it is constant."""
    if tensor is None:
        return None
    array = tensor.constant
    return None if array is None else [int(x) for x in np.ravel(array)]


def first(inputs: Sequence[Tensor | None]) -> Tensor:
    tensor = inputs[0]
    if tensor is None:
        raise NetworkError("the first input is missing")
    return tensor


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
def _like_first(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape)]


def _broadcast(inputs: Sequence[Tensor | None]) -> Shape:
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
def _elementwise(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shape = x.value._shape
    for other in inputs:
        if other is None or other.value._shape is not shape:
            return [(x.dtype, _broadcast(inputs))]
    return [(x.dtype, x.shape)]  # most equal shapes are one object


@infers("And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def _comparison(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.BOOL, _broadcast(inputs))]


@infers("IsNaN", "IsInf")
def _predicate(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.BOOL, first(inputs).shape)]


@infers("Where")
def _where(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    assert inputs[1] is not None
    return [(inputs[1].dtype, _broadcast(inputs))]


@infers("Cast")
def _cast(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType(int(attributes["to"])), first(inputs).shape)]


@infers("CastLike")
def _cast_like(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    assert inputs[1] is not None
    return [(inputs[1].dtype, first(inputs).shape)]


@infers("MatMul")
def _matmul(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b = first(inputs), inputs[1]
    assert b is not None
    left, right = a.shape, b.shape
    if not left or not right:
        raise NetworkError("MatMul of a 0-d tensor")
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    inner = right[-2] if len(right) > 1 else right[0]
    if isinstance(left[-1], int) and isinstance(inner, int) and left[-1] != inner:
        raise NetworkError(f"MatMul of {left} and {right}: {left[-1]} against {inner}")
    return [(a.dtype, shapes.broadcast(left[:-2], right[:-2]) + rows + columns)]


@infers("Gemm")
def _gemm(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    a, b = first(inputs), inputs[1]
    assert b is not None
    rows = a.shape[1 if attributes.get("transA") else 0]
    columns = b.shape[0 if attributes.get("transB") else 1]
    return [(a.dtype, (rows, columns))]


@infers("Einsum")
def _einsum(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    left, right = str(attributes["equation"]).replace(" ", "").split("->")
    sizes: dict[str, Dim] = {}
    for term, tensor in zip(left.split(","), inputs, strict=True):
        assert tensor is not None
        sizes.update(zip(term, tensor.shape, strict=True))
    return [(first(inputs).dtype, tuple(sizes[letter] for letter in right))]


@infers("Shape")
def _shape(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    rank = first(inputs).ndim
    picked = range(rank)[slice(attributes.get("start", 0), attributes.get("end"))]
    return [(ir.DataType.INT64, (len(picked),))]


@infers("Size")
def _size(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.INT64, ())]


@infers("Reshape")
def _reshape(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, target = first(inputs), inputs[1]
    assert target is not None
    wanted = known_ints(target)
    if wanted is None:
        rank = target.shape[0]
        if not isinstance(rank, int):
            raise NetworkError("Reshape to an unknown number of dimensions")
        return [(x.dtype, (None,) * rank)]
    keep_zero = bool(attributes.get("allowzero"))
    dims: list[Dim] = [x.shape[i] if d == 0 and not keep_zero else d for i, d in enumerate(wanted)]
    if -1 in dims:
        rest = shapes.product([d for d in dims if d != -1])
        total = shapes.product(x.shape)
        dims[dims.index(-1)] = (
            total // rest if isinstance(total, int) and isinstance(rest, int) and rest else None
        )
    return [(x.dtype, tuple(dims))]


@infers("Flatten")
def _flatten(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = int(attributes.get("axis", 1))
    return [(x.dtype, (shapes.product(x.shape[:axis]), shapes.product(x.shape[axis:])))]


@infers("Transpose")
def _transpose(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    order = attributes.get("perm") or list(reversed(range(x.ndim)))
    return [(x.dtype, tuple(x.shape[i] for i in order))]


@infers("Unsqueeze")
def _unsqueeze(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, axes = first(inputs), known_ints(inputs[1])
    if axes is None:
        raise NetworkError("Unsqueeze over axes that are not constant")
    rank = x.ndim + len(axes)
    new = {shapes.axis_of(axis, rank) for axis in axes}
    rest = iter(x.shape)
    return [(x.dtype, tuple(1 if i in new else next(rest) for i in range(rank)))]


@infers("Squeeze")
def _squeeze(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axes = known_ints(inputs[1]) if len(inputs) > 1 else None
    if axes is None:
        raise NetworkError("Squeeze over axes that are not constant")
    gone = {shapes.axis_of(axis, x.ndim) for axis in axes}
    return [(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in gone))]


@infers("Expand")
def _expand(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, target = first(inputs), inputs[1]
    assert target is not None
    wanted = known_ints(target)
    if wanted is not None:
        return [(x.dtype, shapes.broadcast(x.shape, tuple(wanted)))]
    rank = target.shape[0]
    if not isinstance(rank, int):
        raise NetworkError("Expand to an unknown number of dimensions")
    return [(x.dtype, (None,) * max(rank, x.ndim))]


@infers("Tile")
def _tile(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, repeats = first(inputs), known_ints(inputs[1])
    if repeats is None:
        return [(x.dtype, (None,) * x.ndim)]
    return [(x.dtype, tuple(shapes.product((d, r)) for d, r in zip(x.shape, repeats, strict=True)))]


@infers("Concat")
def _concat(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes["axis"]), x.ndim)
    total = shapes.add([tensor.shape[axis] for tensor in inputs if tensor is not None])
    return [(x.dtype, (*x.shape[:axis], total, *x.shape[axis + 1 :]))]


@infers("Split")
def _split(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    sizes: Sequence[Dim] | None = known_ints(inputs[1]) if len(inputs) > 1 else None
    if sizes is None:
        total = x.shape[axis]
        if isinstance(total, int):
            step = -(-total // outputs)
            sizes = [min(step, total - i * step) for i in range(outputs)]
        else:
            sizes = [None] * outputs
    return [(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


@infers("Slice")
def _slice(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    starts, ends = known_ints(inputs[1]), known_ints(inputs[2])
    axes = known_ints(inputs[3]) if len(inputs) > 3 else list(range(x.ndim))
    if axes is None:
        raise NetworkError("Slice over axes that are not constant")
    steps = (known_ints(inputs[4]) if len(inputs) > 4 else None) or [1] * len(axes)
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        axis = shapes.axis_of(axis, x.ndim)
        size = dims[axis]
        if starts is None or ends is None or not isinstance(size, int):
            dims[axis] = None
            continue
        low, high = (0, size) if steps[i] > 0 else (-1, size - 1)
        start = starts[i] + size if starts[i] < 0 else starts[i]
        end = ends[i] + size if ends[i] < 0 else ends[i]
        start, end = min(max(start, max(low, 0)), high), min(max(end, low), high if steps[i] > 0 else size)
        dims[axis] = max(0, -(-(end - start) // steps[i]))
    return [(x.dtype, tuple(dims))]


@infers("Gather")
def _gather(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), inputs[1]
    assert indices is not None
    axis = shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    return [(x.dtype, x.shape[:axis] + indices.shape + x.shape[axis + 1 :])]


@infers("GatherElements")
def _gather_elements(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    assert inputs[1] is not None
    return [(first(inputs).dtype, inputs[1].shape)]


@infers("GatherND")
def _gather_nd(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), inputs[1]
    assert indices is not None
    depth, batch = indices.shape[-1], int(attributes.get("batch_dims", 0))
    if not isinstance(depth, int):
        raise NetworkError("GatherND whose index depth is not constant")
    return [(x.dtype, indices.shape[:-1] + x.shape[batch + depth :])]


@infers("Range")
def _range(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    values = [t.constant.item() for t in inputs if t is not None and t.constant is not None]
    count: Dim = None
    if len(values) == 3:
        start, limit, delta = values
        count = max(0, int(np.ceil((limit - start) / delta)))
    return [(first(inputs).dtype, (count,))]


@infers("ConstantOfShape")
def _constant_of_shape(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    target, value = first(inputs), attributes.get("value")
    dtype = ir.DataType.FLOAT if value is None else value.dtype
    dims = known_ints(target)
    if dims is not None:
        return [(dtype, tuple(dims))]
    rank = target.shape[0]
    if not isinstance(rank, int):
        raise NetworkError("ConstantOfShape of an unknown number of dimensions")
    return [(dtype, (None,) * rank)]


@infers("EyeLike")
def _eye_like(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(ir.DataType(int(attributes.get("dtype", x.dtype))), x.shape)]


@infers("NonZero")
def _non_zero(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.INT64, (first(inputs).ndim, None))]


@infers("OneHot")
def _one_hot(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    indices, depth, values = first(inputs), known_ints(inputs[1]), inputs[2]
    assert values is not None
    axis = shapes.axis_of(int(attributes.get("axis", -1)), indices.ndim + 1)
    size: Dim = depth[0] if depth else None
    return [(values.dtype, (*indices.shape[:axis], size, *indices.shape[axis:]))]


@infers("Pad")
def _pad(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, pads = first(inputs), known_ints(inputs[1])
    axes = known_ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(x.ndim))
    if axes is None:
        raise NetworkError("Pad over axes that are not constant")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        axis = shapes.axis_of(axis, x.ndim)
        dims[axis] = None if pads is None else shapes.add((dims[axis], pads[i], pads[i + len(axes)]))
    return [(x.dtype, tuple(dims))]


@infers(
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)
def _reduce(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axes = known_ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else None
    if axes is None or not axes:
        axes = [] if attributes.get("noop_with_empty_axes") else list(range(x.ndim))
    return [(x.dtype, _reduced(x.shape, axes, bool(attributes.get("keepdims", 1))))]


def _reduced(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    gone = {shapes.axis_of(axis, len(shape)) for axis in axes}
    if keep:
        return tuple(1 if i in gone else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in gone)


@infers("ArgMax", "ArgMin")
def _arg_reduce(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    axis, keep = int(attributes.get("axis", 0)), bool(attributes.get("keepdims", 1))
    return [(ir.DataType.INT64, _reduced(first(inputs).shape, [axis], keep))]


@infers("TopK")
def _topk(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, count = first(inputs), known_ints(inputs[1])
    axis = shapes.axis_of(int(attributes.get("axis", -1)), x.ndim)
    shape = (*x.shape[:axis], count[0] if count else None, *x.shape[axis + 1 :])
    return [(x.dtype, shape), (ir.DataType.INT64, shape)]


@infers("Unique")
def _unique(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, axis = first(inputs), attributes.get("axis")
    values = (None,) if axis is None else (*x.shape[:axis], None, *x.shape[axis + 1 :])
    return [(x.dtype, values), *[(ir.DataType.INT64, (None,))] * 3][:outputs]


@infers("Dropout")
def _dropout(inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape), (ir.DataType.BOOL, x.shape)][:outputs]
