"""Where the batch is in the results of views, joins, look-ups and creation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from intarsia.graph.rows.call import Call, Mixes, Numbers, Placement, Rows, Size, Unknown

_TO_THE_END = 2**31  # a slice to this end or beyond has all rows


def _moved(call: Call, place: Placement, axis: int) -> Placement:
    """The same kind of value, with its batch at another axis."""
    return Numbers(axis) if isinstance(place, Numbers) else call.at(axis)


def _axis(place: Placement, call: Call) -> int:
    if not isinstance(place, Rows | Numbers):
        raise Unknown(f"{call.name} takes rows into an argument that is not supported")
    return place.axis


def reshape(call: Call) -> Placement:
    """Elements keep their order in memory, so as many come before the batch as did before."""
    place, value = call.of("self"), call.arg("self")
    if place is None:
        raise Mixes(f"{call.name} shapes a constant by the size of the batch")
    if value.numel() == 0:
        raise Unknown(f"{call.name} of no elements is not supported")
    axis = _axis(place, call)
    before = math.prod(value.shape[:axis]) * getattr(place, "outer", 1)
    passed = 1
    for new, length in enumerate(call.result.shape):
        outer, rest = divmod(before, passed)
        if not rest and outer and length % (outer * call.size) == 0:
            moved = call.folded(new, outer)
            if isinstance(place, Numbers) and moved != Rows(new):
                raise Mixes(f"{call.name} folds the numbers of rows with another axis")
            return Numbers(new) if isinstance(place, Numbers) else moved
        passed *= length
    raise Unknown(f"{call.name} splits the axis of the batch")


def transpose(call: Call) -> Placement:
    place, rank = call.of("self"), call.result.dim()
    pair = [call.arg("dim0", 0) % rank, call.arg("dim1", 1) % rank] if rank else []
    if call.name == "aten::t" and rank < 2:
        return place  # type: ignore[no-any-return]
    if call.name == "aten::numpy_T" and rank != 2:
        raise Unknown(f"{call.name} of {rank} axes is not supported")
    axis = _axis(place, call)
    return _moved(call, place, pair[1 - pair.index(axis)] if axis in pair else axis)


def permute(call: Call) -> Placement:
    place = call.of("self")
    order = [dim % call.result.dim() for dim in call.arg("dims")]
    return _moved(call, place, order.index(_axis(place, call)))


def unsqueeze(call: Call) -> Placement:
    place = call.of("self")
    axis, new = _axis(place, call), call.arg("dim") % call.result.dim()
    return _moved(call, place, axis + (new <= axis))


def squeeze(call: Call) -> Placement:
    place, value = call.of("self"), call.arg("self")
    axis, dims = _axis(place, call), call.arg("dim", None)
    if dims is None:
        raise Unknown(f"{call.name} removes every axis of length 1, the batch's too if it has one row")
    removed = {d % value.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    if axis in removed:
        raise Mixes(f"{call.name} removes the batch if it has one row")
    return _moved(call, place, axis - sum(value.shape[d] == 1 for d in removed if d < axis))


def expand(call: Call) -> Placement:
    """A constant repeated for every row, or rows repeated along other axes."""
    place, value = call.of("self"), call.arg("self")
    sized = [axis for axis, where in enumerate(call.of("size")) if isinstance(where, Size)]
    if place is None:
        return _filled(call, sized)
    axis = _axis(place, call) + call.result.dim() - value.dim()
    if any(other != axis for other in sized):
        raise Mixes(f"{call.name} repeats rows as often as there are rows")
    return _moved(call, place, axis)


def repeat(call: Call) -> Placement:
    place, value, repeats = call.of("self"), call.arg("self"), call.arg("repeats")
    sized = [axis for axis, where in enumerate(call.of("repeats")) if isinstance(where, Size)]
    added = len(repeats) - value.dim()
    if place is None:
        if any(axis >= added and value.shape[axis - added] != 1 for axis in sized):
            raise Mixes(f"{call.name} repeats a constant that has an axis of its own there")
        return _filled(call, sized)
    axis = _axis(place, call) + added
    if sized or repeats[axis] != 1:
        raise Mixes(f"{call.name} repeats the batch")
    return _moved(call, place, axis)


def _filled(call: Call, sized: Sequence[int]) -> Rows:
    if len(sized) != 1:
        raise Mixes(f"{call.name} makes a tensor with the size of the batch along {len(sized)} axes")
    return call.at(sized[0])


def creation(call: Call) -> Placement:
    """A tensor with one value everywhere, and the batch as one axis of its shape."""
    if isinstance(call.of("fill_value"), Size):
        raise Mixes(f"{call.name} fills a tensor with the size of the batch")
    sizes = call.of("size")
    sized = [axis for axis, where in enumerate(sizes) if isinstance(where, Size)]
    if not sized and isinstance(call.of("self"), Rows | Numbers):  # `new_ones` of a shape of its own
        return None
    return _filled(call, sized)


def like(call: Call) -> Placement:
    call.only("self")
    return call.at(_axis(call.of("self"), call))


def arange(call: Call) -> Placement:
    start, step = call.arg("start", 0), call.arg("step", 1)
    if call.sizes() != ["end"] or start != 0 or step != 1 or len(call.result) != call.size:
        raise Mixes(f"{call.name} counts by the size of the batch")
    return Numbers(0)


def cut(call: Call) -> Any:
    """Parts along another axis than the batch's, or all of the batch's."""
    place, value = call.of("self"), call.arg("self")
    axis, dim = _axis(place, call), call.arg("dim", 0) % value.dim()
    if dim != axis:
        if call.sizes():
            raise Mixes(f"{call.name} cuts another axis by the size of the batch")
        if isinstance(place, Numbers):
            return (
                Numbers(axis)
                if isinstance(call.result, torch.Tensor)
                else (Numbers(axis),) * len(call.result)
            )
        return call.everywhere(axis)
    whole = call.name in ("aten::slice", "aten::slice_copy") and (
        call.arg("start") in (None, 0)
        and call.of("start") is None
        and call.arg("step", 1) == 1
        and (call.arg("end") is None or call.arg("end") >= _TO_THE_END or _is_size(call, "end", axis))
    )
    if not whole:
        raise Mixes(f"{call.name} selects some rows only")
    return _moved(call, place, axis)


def _is_size(call: Call, name: str, axis: int) -> bool:
    return isinstance(call.of(name), Size) and bool(call.arg(name) == call.arg("self").shape[axis])


def select(call: Call) -> Any:
    """One position of another axis than the batch's; the axis is removed."""
    place, value = call.of("self"), call.arg("self")
    axis, dim = _axis(place, call), call.arg("dim", 0) % value.dim()
    if dim == axis:
        raise Mixes(f"{call.name} selects one row")
    if call.sizes():
        raise Mixes(f"{call.name} selects by the size of the batch")
    if isinstance(place, Numbers):
        raise Mixes(f"{call.name} selects from the numbers of rows")
    return call.everywhere(axis - (dim < axis))


def cat(call: Call) -> Placement:
    tensors, places = call.arg("tensors"), call.of("tensors")
    axes = {where.axis if isinstance(where, Rows) else None for where in places}
    stacked = call.name == "aten::stack"
    dim = call.arg("dim", 0) % (tensors[0].dim() + stacked)
    if len(axes) != 1 or None in axes:
        raise Mixes(f"{call.name} joins rows with what is not a row")
    axis = places[0].axis
    if not stacked and dim == axis:
        raise Mixes(f"{call.name} concatenates batches")
    return call.at(axis + (stacked and dim <= axis))


# Look-ups by index.


def gather(call: Call) -> Placement:
    place, indices = call.of("self"), call.of("index")
    dim = call.arg("dim") % max(1, call.arg("self").dim())
    if not isinstance(place, Rows) or place != indices or place.axis == dim:
        raise Mixes(f"{call.name} selects from other rows than those of its indices")
    return call.at(place.axis)


def index(call: Call) -> Placement:
    """`x[i, :, j]`: the axes of the indices replace those they index.

    An index along the batch must be the numbers of the rows, so that each row selects from itself.
    """
    value, place = call.arg("self"), call.of("self")
    indices, placed = call.arg("indices"), call.of("indices")
    if any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices):
        raise Unknown(f"{call.name} selects by a mask")
    indices = [*indices, *[None] * (value.dim() - len(indices))]
    placed = [*placed, *[None] * (value.dim() - len(placed))]
    where = [axis for axis, item in enumerate(indices) if item is not None]
    rank = max(indices[axis].dim() for axis in where)
    together = where == list(range(where[0], where[-1] + 1))
    start = where[0] if together else 0
    own = isinstance(place, Rows) and isinstance(placed[place.axis], Numbers)
    steps = {
        placed[axis].axis + rank - indices[axis].dim()
        for axis in where
        if isinstance(placed[axis], Rows | Numbers)
    }
    if isinstance(place, Rows) and not own:
        if steps or indices[place.axis] is not None:
            raise Mixes(f"{call.name} selects from all rows")
        sliced_before = sum(indices[axis] is None for axis in range(place.axis))
        passed = rank if not together or where[0] < place.axis else 0
        return call.at(sliced_before + passed)
    if any(
        isinstance(placed[axis], Numbers) for axis in where if not own or axis != getattr(place, "axis", None)
    ):
        raise Mixes(f"{call.name} selects by the numbers of rows")
    if len(steps) != 1 or (own and isinstance(place, Rows) and place != Rows(place.axis)):
        raise Mixes(f"{call.name} selects by indices of other rows")
    (step,) = steps
    for axis in where:
        if placed[axis] is None and _size_at(indices[axis], step, rank) != 1:
            raise Mixes(f"{call.name} selects by constants along the batch")
    return call.at(start + step)


def _size_at(item: torch.Tensor, axis: int, rank: int) -> int:
    own = axis - (rank - item.dim())
    return item.shape[own] if own >= 0 else 1
