"""Shape rules of operators that pick elements, or make tensors of a given size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints, length, optional, second
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue


@infers("Gather")
def _gather(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), second(inputs)
    axis = shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    return [(x.dtype, x.shape[:axis] + indices.shape + x.shape[axis + 1 :])]


@infers("GatherElements")
def _gather_each(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), second(inputs)
    shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    shapes.require_rank(indices, "the indices of GatherElements", x.ndim)
    return [(x.dtype, indices.shape)]


@infers("GatherND")
def _gather_nd(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, indices = first(inputs), second(inputs)
    shapes.require_rank(x, "what GatherND picks from", 1, 99)
    shapes.require_rank(indices, "the indices of GatherND", 1, 99)
    depth, batch = indices.shape[-1], int(attributes.get("batch_dims", 0))
    if not isinstance(depth, int):
        raise NetworkError("GatherND whose index depth is not constant")
    if batch + depth > x.ndim:
        raise NetworkError(f"GatherND by {depth} indices after {batch} dimensions, of {x.ndim}")
    return [(x.dtype, indices.shape[:-1] + x.shape[batch + depth :])]


@infers("Range")
def _range(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    values = [t.constant.item() for t in inputs if t is not None and t.constant is not None]
    count: Dim = None
    if len(values) == 3:
        start, limit, delta = values
        if delta == 0:
            raise NetworkError("Range by steps of 0")
        count = max(0, int(np.ceil((limit - start) / delta)))
    return [(first(inputs).dtype, (count,))]


@infers("ConstantOfShape")
def _filled(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    target, value = first(inputs), attributes.get("value")
    dtype = ir.DataType.FLOAT if value is None else value.dtype
    dims = known_ints(target)
    if dims is not None and target.ndim == 1:
        return [(dtype, tuple(dims))]
    return [(dtype, (None,) * length(target, "the shape of ConstantOfShape"))]


@infers("EyeLike")
def _eye_like(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    shapes.require_rank(x, "what EyeLike is like", 2)
    return [(ir.DataType(int(attributes.get("dtype", x.dtype))), x.shape)]


@infers("NonZero")
def _non_zero(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.INT64, (first(inputs).ndim, None))]


@infers("OneHot")
def _one_hot(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    indices, depth, values = first(inputs), known_ints(second(inputs)), inputs[2]
    assert values is not None
    shapes.require_rank(indices, "the indices of OneHot", 1, 99)
    shapes.require_rank(second(inputs), "the depth of OneHot", 0, 1)
    shapes.same(shapes.product(second(inputs).shape), 1, "the depth of OneHot")
    shapes.require_rank(values, "the values of OneHot", 1)
    shapes.same(values.shape[0], 2, "the values of OneHot")
    axis = shapes.axis_of(int(attributes.get("axis", -1)), indices.ndim + 1)
    size: Dim = depth[0] if depth else None
    return [(values.dtype, (*indices.shape[:axis], size, *indices.shape[axis:]))]


@infers("Pad")
def _pad(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, pads, given = first(inputs), known_ints(second(inputs)), optional(inputs, 3)
    axes = list(range(x.ndim)) if given is None else known_ints(given)
    if axes is None:
        return [(x.dtype, (None,) * x.ndim)]
    axes = shapes.axes_of(axes, x.ndim)
    if pads is not None and len(pads) != 2 * len(axes):
        raise NetworkError(f"{len(pads)} pads for {len(axes)} dimensions")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        dims[axis] = None if pads is None else _padded(dims[axis], pads[i] + pads[i + len(axes)])
    return [(x.dtype, tuple(dims))]


def _padded(size: Dim, pads: int) -> Dim:
    made = shapes.add((size, pads))
    if isinstance(made, int) and made < 0:
        raise NetworkError(f"Pad cuts {-pads} off {size}")
    return made
