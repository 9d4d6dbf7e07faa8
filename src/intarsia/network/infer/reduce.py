"""Shape rules of reductions, and of operators that pick the largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints, optional
from intarsia.network.types import Shape
from intarsia.network.value import TypedValue


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
def _reduce(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, given = first(inputs), optional(inputs, 1)
    keep = bool(attributes.get("keepdims", 1))
    axes = known_ints(given)
    if given is not None and axes is None:  # any of the dimensions, and how many only if that is known
        count = given.shape[0] if given.ndim == 1 else None
        if not keep and (not isinstance(count, int) or not count):
            raise NetworkError("a reduction over an unknown number of dimensions")
        return [(x.dtype, (None,) * (x.ndim if keep else x.ndim - int(count)))]  # type: ignore[arg-type]
    if not axes:
        axes = [] if attributes.get("noop_with_empty_axes") else list(range(x.ndim))
    return [(x.dtype, _reduced(x.shape, axes, keep))]


def _reduced(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    gone = shapes.axes_of(axes, len(shape))
    if keep:
        return tuple(1 if i in gone else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in gone)


@infers("ArgMax", "ArgMin")
def _arg_reduce(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    axis, keep = int(attributes.get("axis", 0)), bool(attributes.get("keepdims", 1))
    return [(ir.DataType.INT64, _reduced(first(inputs).shape, [axis], keep))]


@infers("TopK")
def _topk(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, count = first(inputs), known_ints(inputs[1])
    axis = shapes.axis_of(int(attributes.get("axis", -1)), x.ndim)
    size = x.shape[axis]
    if count and isinstance(size, int) and not 0 <= count[0] <= size:
        raise NetworkError(f"TopK of {count[0]} among {size}")
    shape = (*x.shape[:axis], count[0] if count else None, *x.shape[axis + 1 :])
    return [(x.dtype, shape), (ir.DataType.INT64, shape)]


@infers("Unique")
def _unique(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, given = first(inputs), attributes.get("axis")
    values: Shape = (None,)
    if given is not None:
        axis = shapes.axis_of(int(given), x.ndim)
        values = (*x.shape[:axis], None, *x.shape[axis + 1 :])
    return [(x.dtype, values), *[(ir.DataType.INT64, (None,))] * 3][:outputs]


@infers("Dropout")
def _dropout(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(x.dtype, x.shape), (ir.DataType.BOOL, x.shape)][:outputs]
