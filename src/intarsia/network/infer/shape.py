"""Shape rules of operators that ask for, change, join and cut shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue


@infers("Shape")
def _shape(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    rank = first(inputs).ndim
    picked = range(rank)[slice(attributes.get("start", 0), attributes.get("end"))]
    return [(ir.DataType.INT64, (len(picked),))]


@infers("Size")
def _size(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    return [(ir.DataType.INT64, ())]


@infers("Reshape")
def _reshape(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
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
def _flatten(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = int(attributes.get("axis", 1))
    return [(x.dtype, (shapes.product(x.shape[:axis]), shapes.product(x.shape[axis:])))]


@infers("Transpose")
def _transpose(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    order = attributes.get("perm") or list(reversed(range(x.ndim)))
    return [(x.dtype, tuple(x.shape[i] for i in order))]


@infers("Unsqueeze")
def _unsqueeze(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, axes = first(inputs), known_ints(inputs[1])
    if axes is None:
        raise NetworkError("Unsqueeze over axes that are not constant")
    rank = x.ndim + len(axes)
    new = {shapes.axis_of(axis, rank) for axis in axes}
    rest = iter(x.shape)
    return [(x.dtype, tuple(1 if i in new else next(rest) for i in range(rank)))]


@infers("Squeeze")
def _squeeze(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axes = known_ints(inputs[1]) if len(inputs) > 1 else None
    if axes is None:
        raise NetworkError("Squeeze over axes that are not constant")
    gone = {shapes.axis_of(axis, x.ndim) for axis in axes}
    return [(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in gone))]


@infers("Expand")
def _expand(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
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
def _tile(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, repeats = first(inputs), known_ints(inputs[1])
    if repeats is None:
        return [(x.dtype, (None,) * x.ndim)]
    return [(x.dtype, tuple(shapes.product((d, r)) for d, r in zip(x.shape, repeats, strict=True)))]


@infers("Concat")
def _concat(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes["axis"]), x.ndim)
    total = shapes.add([tensor.shape[axis] for tensor in inputs if tensor is not None])
    return [(x.dtype, (*x.shape[:axis], total, *x.shape[axis + 1 :]))]


@infers("Split")
def _split(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
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
def _slice(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
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
