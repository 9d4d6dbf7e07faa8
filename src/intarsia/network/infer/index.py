"""Shape rules of operators that pick elements, or make tensors of a given size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue


@infers("Gather")
def _gather(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), inputs[1]
    assert indices is not None
    axis = shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    return [(x.dtype, x.shape[:axis] + indices.shape + x.shape[axis + 1 :])]


@infers("GatherElements")
def _gather_elements(
    inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int
) -> Made:
    assert inputs[1] is not None
    return [(first(inputs).dtype, inputs[1].shape)]


@infers("GatherND")
def _gather_nd(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), inputs[1]
    assert indices is not None
    depth, batch = indices.shape[-1], int(attributes.get("batch_dims", 0))
    if not isinstance(depth, int):
        raise NetworkError("GatherND whose index depth is not constant")
    return [(x.dtype, indices.shape[:-1] + x.shape[batch + depth :])]


@infers("Range")
def _range(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    values = [t.constant.item() for t in inputs if t is not None and t.constant is not None]
    count: Dim = None
    if len(values) == 3:
        start, limit, delta = values
        count = max(0, int(np.ceil((limit - start) / delta)))
    return [(first(inputs).dtype, (count,))]


@infers("ConstantOfShape")
def _constant_of_shape(
    inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int
) -> Made:
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
def _eye_like(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    return [(ir.DataType(int(attributes.get("dtype", x.dtype))), x.shape)]


@infers("NonZero")
def _non_zero(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.INT64, (first(inputs).ndim, None))]


@infers("OneHot")
def _one_hot(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    indices, depth, values = first(inputs), known_ints(inputs[1]), inputs[2]
    assert values is not None
    axis = shapes.axis_of(int(attributes.get("axis", -1)), indices.ndim + 1)
    size: Dim = depth[0] if depth else None
    return [(values.dtype, (*indices.shape[:axis], size, *indices.shape[axis:]))]


@infers("Pad")
def _pad(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, pads = first(inputs), known_ints(inputs[1])
    axes = known_ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(x.ndim))
    if axes is None:
        raise NetworkError("Pad over axes that are not constant")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        axis = shapes.axis_of(axis, x.ndim)
        dims[axis] = None if pads is None else shapes.add((dims[axis], pads[i], pads[i + len(axes)]))
    return [(x.dtype, tuple(dims))]
