"""Where the batch goes when a tensor is viewed, joined, picked from or made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from intarsia.graph.rows.call import Call, Mixes, Numbers, Placement, Rows, Size, Unknown

_TO_THE_END = 2**31  # a slice that ends here or beyond takes all rows, however many there are


def _moved(call: Call, place: Placement, axis: int) -> Placement:
    """The same kind of value, its batch at another axis."""
    return Numbers(axis) if isinstance(place, Numbers) else call.at(axis)


def _axis(place: Placement, call: Call) -> int:
    if not isinstance(place, Rows | Numbers):
        raise Unknown(f"{call.name} takes rows into an argument that is not understood")
    return place.axis


def reshape(call: Call) -> Placement:
    """Memory keeps its order: before the batch stand as many elements as stood there."""
    place, value = call.of("self"), call.arg("self")
    if place is None:
        raise Mixes(f"{call.name} shapes a constant by the size of the batch")
    if value.numel() == 0:
        raise Unknown(f"{call.name} of no elements is not understood")
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
    raise Unknown(f"{call.name} tears the batch apart")


def transpose(call: Call) -> Placement:
    place, rank = call.of("self"), call.result.dim()
    pair = [call.arg("dim0", 0) % rank, call.arg("dim1", 1) % rank] if rank else []
    if call.name == "aten::t" and rank < 2:
        return place  # type: ignore[no-any-return]
    if call.name == "aten::numpy_T" and rank != 2:
        raise Unknown(f"{call.name} of {rank} axes is not understood")
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
        raise Unknown(f"{call.name} takes out every axis of length 1, the batch's too if it has one row")
    gone = {d % value.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    if axis in gone:
        raise Mixes(f"{call.name} takes out the batch where it has one row")
    return _moved(call, place, axis - sum(value.shape[d] == 1 for d in gone if d < axis))


def expand(call: Call) -> Placement:
    """A constant repeated for every row, or rows repeated along other axes."""
    found, value = call.of("self"), call.arg("self")
    sized = [axis for axis, where in enumerate(call.of("size")) if isinstance(where, Size)]
    if found is None:
        return _filled(call, sized)
    axis = _axis(found, call) + call.result.dim() - value.dim()
    if any(place != axis for place in sized):
        raise Mixes(f"{call.name} repeats rows as often as there are rows")
    return _moved(call, found, axis)


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
    """A tensor of one value everywhere, of a shape that has the batch along one axis."""
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
    """Parts along an axis that is not the batch's, or all of the batch's."""
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
        raise Mixes(f"{call.name} takes some rows and leaves others")
    return _moved(call, place, axis)


def _is_size(call: Call, name: str, axis: int) -> bool:
    return isinstance(call.of(name), Size) and bool(call.arg(name) == call.arg("self").shape[axis])


def select(call: Call) -> Any:
    """One place of an axis that is not the batch's, which then is gone."""
    place, value = call.of("self"), call.arg("self")
    axis, dim = _axis(place, call), call.arg("dim", 0) % value.dim()
    if dim == axis:
        raise Mixes(f"{call.name} takes one row and leaves others")
    if call.sizes():
        raise Mixes(f"{call.name} picks by the size of the batch")
    if isinstance(place, Numbers):
        raise Mixes(f"{call.name} picks from the numbers of rows")
    return call.everywhere(axis - (dim < axis))


def cat(call: Call) -> Placement:
    tensors, places = call.arg("tensors"), call.of("tensors")
    axes = {where.axis if isinstance(where, Rows) else None for where in places}
    stacked = call.name == "aten::stack"
    dim = call.arg("dim", 0) % (tensors[0].dim() + stacked)
    if len(axes) != 1 or None in axes:
        raise Mixes(f"{call.name} joins rows with what is not a row")
    (axis,) = (places[0].axis,)
    if not stacked and dim == axis:
        raise Mixes(f"{call.name} joins batches one after the other")
    return call.at(axis + (stacked and dim <= axis))
