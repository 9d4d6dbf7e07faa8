"""Shape rules of operators that ask for, change, join and cut shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints, length, optional, second
from intarsia.network.types import Dim, Shape
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
    x, target = first(inputs), second(inputs)
    rank, wanted = length(target, "the shape of Reshape"), known_ints(target)
    if wanted is None:
        return [(x.dtype, (None,) * rank)]
    keep_zero = bool(attributes.get("allowzero"))
    if wanted.count(-1) > 1 or min(wanted, default=0) < -1 or (keep_zero and -1 in wanted and 0 in wanted):
        raise NetworkError(f"Reshape to {wanted}")
    if not keep_zero and any(d == 0 and i >= x.ndim for i, d in enumerate(wanted)):
        raise NetworkError(f"Reshape of {list(x.shape)} to {wanted}: there is no such size to keep")
    dims: list[Dim] = [x.shape[i] if d == 0 and not keep_zero else d for i, d in enumerate(wanted)]
    # Sizes that are kept as they are count on neither side.
    kept = set() if keep_zero else {i for i, d in enumerate(wanted) if d == 0}
    if 0 in x.shape:
        kept = set()
    total = shapes.product([d for i, d in enumerate(x.shape) if i not in kept])
    rest = shapes.product([d for i, d in enumerate(dims) if i not in kept and d != -1])
    if -1 in dims:
        dims[dims.index(-1)] = _rest(total, rest, f"Reshape of {list(x.shape)} to {wanted}")
    else:
        shapes.same(total, rest, f"Reshape of {list(x.shape)} to {wanted}")
    return [(x.dtype, tuple(dims))]


def _rest(total: Dim, others: Dim, what: str) -> Dim:
    """The size that makes up a total with the others."""
    if others == 1:
        return total
    if not isinstance(total, int) or not isinstance(others, int) or not others:
        return None
    return shapes.quotient(total, others, what)


@infers("Flatten")
def _flatten(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = int(attributes.get("axis", 1))
    if not -x.ndim <= axis <= x.ndim:
        raise NetworkError(f"Flatten at {axis} of {x.ndim} dimensions")
    return [(x.dtype, (shapes.product(x.shape[:axis]), shapes.product(x.shape[axis:])))]


@infers("Transpose")
def _transpose(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    order = list(attributes.get("perm") or reversed(range(x.ndim)))
    if sorted(order) != list(range(x.ndim)):
        raise NetworkError(f"Transpose of {x.ndim} dimensions by {order}")
    return [(x.dtype, tuple(x.shape[i] for i in order))]


@infers("Unsqueeze")
def _unsqueeze(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, axes = first(inputs), known_ints(inputs[1])
    if axes is None:
        raise NetworkError("Unsqueeze over axes that are not constant")
    rank = x.ndim + len(axes)
    new = set(shapes.axes_of(axes, rank))
    rest = iter(x.shape)
    return [(x.dtype, tuple(1 if i in new else next(rest) for i in range(rank)))]


@infers("Squeeze")
def _squeeze(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, given = first(inputs), optional(inputs, 1)
    if given is None:
        if not all(isinstance(d, int) for d in x.shape):
            raise NetworkError(f"Squeeze of {x!r}, of which it is not known what is 1")
        return [(x.dtype, tuple(d for d in x.shape if d != 1))]
    axes = known_ints(given)
    if axes is None:
        raise NetworkError("Squeeze over axes that are not constant")
    gone = shapes.axes_of(axes, x.ndim)
    for axis in gone:
        shapes.same(x.shape[axis], 1, f"Squeeze of dimension {axis}")
    return [(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in gone))]


@infers("Expand")
def _expand(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, target = first(inputs), second(inputs)
    rank, wanted = length(target, "the shape of Expand"), known_ints(target)
    unknown: Shape = (None,) * rank
    return [(x.dtype, shapes.broadcast(x.shape, unknown if wanted is None else tuple(wanted)))]


@infers("Tile")
def _tile(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, repeats = first(inputs), known_ints(second(inputs))
    shapes.same(length(second(inputs), "the repeats of Tile"), x.ndim, "repeats and dimensions of Tile")
    if repeats is None:
        return [(x.dtype, (None,) * x.ndim)]
    return [(x.dtype, tuple(shapes.product((d, r)) for d, r in zip(x.shape, repeats, strict=True)))]


@infers("Concat")
def _concat(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes["axis"]), x.ndim)
    dims = list(x.shape)
    for tensor in inputs[1:]:
        assert tensor is not None
        shapes.require_rank(tensor, "an input of Concat", x.ndim)
        for i, dim in enumerate(tensor.shape):
            if i != axis:
                dims[i] = shapes.same(dims[i], dim, f"dimension {i} of Concat")
    dims[axis] = shapes.add([tensor.shape[axis] for tensor in inputs if tensor is not None])
    return [(x.dtype, tuple(dims))]


@infers("Split")
def _split(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x = first(inputs)
    axis = shapes.axis_of(int(attributes.get("axis", 0)), x.ndim)
    given, total = optional(inputs, 1), x.shape[axis]
    sizes: Sequence[Dim] | None = known_ints(given)
    if sizes is not None:
        shapes.same(shapes.add(sizes), total, f"the sizes {sizes} of Split")
        shapes.same(len(sizes), outputs, "sizes and outputs of Split")
    elif given is None and isinstance(total, int):
        count = int(attributes.get("num_outputs", outputs))
        step = -(-total // count)
        sizes = [max(0, min(step, total - i * step)) for i in range(outputs)]
    else:
        sizes = [total if outputs == 1 else None] * outputs
    return [(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


@infers("Slice")
def _slice(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, given = first(inputs), optional(inputs, 3)
    starts, ends, steps = known_ints(second(inputs)), known_ints(inputs[2]), optional(inputs, 4)
    count = length(second(inputs), "the starts of Slice")
    axes = list(range(count)) if given is None else known_ints(given)
    if axes is None:
        return [(x.dtype, (None,) * x.ndim)]
    axes = shapes.axes_of(axes, x.ndim)
    by = [1] * count if steps is None else known_ints(steps)
    for name, numbers in (("axes", axes), ("ends", ends), ("steps", by)):
        if numbers is not None and len(numbers) != count:
            raise NetworkError(f"Slice has {count} starts and {len(numbers)} {name}")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        size = dims[axis]
        if starts is None or ends is None or by is None or not isinstance(size, int):
            dims[axis] = None
        elif by[i] == 0:
            raise NetworkError("Slice by steps of 0")
        else:
            dims[axis] = _sliced(size, starts[i], ends[i], by[i])
    return [(x.dtype, tuple(dims))]


def _sliced(size: int, start: int, end: int, step: int) -> int:
    """How many elements a slice takes; unlike Python, a start before the first element is the first."""
    start, end = (place + size if place < 0 else place for place in (start, end))
    least, most = (0, size) if step > 0 else (-1, size - 1)
    start, end = min(max(start, 0), most), min(max(end, least), most)
    return max(0, -(-(end - start) // step))
