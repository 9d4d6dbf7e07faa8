"""Where the batch goes when elements are picked by index."""

from __future__ import annotations

import torch

from intarsia.graph.rows.call import Call, Mixes, Numbers, Placement, Rows, Unknown


def embedding(call: Call) -> Placement:
    call.only("indices")
    return call.at(call.rows("indices").axis)


def gather(call: Call) -> Placement:
    place, chosen = call.of("self"), call.of("index")
    dim = call.arg("dim") % max(1, call.arg("self").dim())
    if not isinstance(place, Rows) or place != chosen or place.axis == dim:
        raise Mixes(f"{call.name} picks from other rows than those it has indices for")
    return call.at(place.axis)


def index_select(call: Call) -> Placement:
    call.only("self")
    axis, dim = call.rows("self").axis, call.arg("dim") % call.arg("self").dim()
    if axis == dim:
        raise Mixes(f"{call.name} picks among the rows")
    return call.at(axis)


def index(call: Call) -> Placement:
    """`x[i, :, j]`: the axes of the indices take the place of those they index.

    An index along the batch must be the numbers of the rows, each row's own, in step with all other indices.
    """
    value, place = call.arg("self"), call.of("self")
    indices, placed = call.arg("indices"), call.of("indices")
    if any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices):
        raise Unknown(f"{call.name} picks by a mask")
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
            raise Mixes(f"{call.name} picks from all rows")
        kept_before = sum(indices[axis] is None for axis in range(place.axis))
        passed = rank if not together or where[0] < place.axis else 0
        return call.at(kept_before + passed)
    if any(
        isinstance(placed[axis], Numbers) for axis in where if not own or axis != getattr(place, "axis", None)
    ):
        raise Mixes(f"{call.name} picks by the numbers of rows")
    if len(steps) != 1 or (own and isinstance(place, Rows) and place != Rows(place.axis)):
        raise Mixes(f"{call.name} picks by indices that are not in step with the rows")
    (step,) = steps
    for axis in where:
        if placed[axis] is None and _size_at(indices[axis], step, rank) != 1:
            raise Mixes(f"{call.name} picks by constants along the batch")
    return call.at(start + step)


def _size_at(item: torch.Tensor, axis: int, rank: int) -> int:
    own = axis - (rank - item.dim())
    return item.shape[own] if own >= 0 else 1
