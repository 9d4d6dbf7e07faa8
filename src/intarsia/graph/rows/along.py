"""Operators that combine entries of one argument along some of its axes: the batch must be another axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from intarsia.graph.rows.call import Call, Mixes, Numbers, Rows, Unknown, flat

Axes = Callable[[Call, int], Iterable[int]]
"""(call, number of axes of the argument) -> the axes along which the operator combines entries."""


@dataclass(frozen=True)
class Along:
    """The rule of an operator that combines entries of one argument along some axes.

    It is the first argument, unless `argument` names it. Arguments in `others` are divided in the same way;
    all further arguments are constant.
    """

    axes: Axes = lambda call, rank: ()
    reason: str = "runs along the batch"
    error: type[Mixes] = Mixes
    argument: str = ""
    others: tuple[str, ...] = ()

    def __call__(self, call: Call) -> Any:
        """Where the batch is in the results."""
        name = self.argument or call.names[0]
        axis, rank = call.axis(name, *self.others), call.arg(name).dim()
        apart = all(call.of(other) in (None, call.of(name)) for other in self.others)
        if not apart or axis in {one % rank for one in self.axes(call, rank)}:
            raise self.error(f"{call.name} {self.reason}")
        return numbered(call, call.kept()) if isinstance(call.of(name), Numbers) else call.kept()


def numbered(call: Call, places: Any) -> Any:
    """The same places, of numbers of rows."""
    if any(isinstance(place, Rows) and place != Rows(place.axis) for place in flat([places])):
        raise Mixes(f"{call.name} folds the numbers of rows with another axis")
    several = isinstance(places, tuple)
    return tuple(Numbers(place.axis) for place in places) if several else Numbers(places.axis)


def named(call: Call, rank: int) -> Iterable[int]:
    """The axes in `dim` or `dims`; all if none is given."""
    dims = call.arg("dims") or call.arg("dim")
    return [dims] if isinstance(dims, int) else dims or range(rank)


def last(count: int) -> Axes:
    return lambda call, rank: range(max(0, rank - count), rank)


def normalized(call: Call, rank: int) -> Iterable[int]:
    return range(rank - len(call.arg("normalized_shape")), rank)


def padded(call: Call, rank: int) -> Iterable[int]:
    return range(rank - len(call.arg("pad")) // 2, rank)


def within(call: Call, rank: int) -> Iterable[int]:
    """All axes but the first: each entry of the first axis is computed alone."""
    return range(rank > 1, rank)


def spatial(call: Call, rank: int) -> Iterable[int]:
    return last(int(next(filter(str.isdigit, call.name))))(call, rank)


def of_convolution(call: Call, rank: int) -> Iterable[int]:
    return range(rank == call.arg("weight").dim(), rank)  # without a batch, the first axis are the channels


def squeezed(call: Call, rank: int) -> Iterable[int]:
    if call.arg("dim") is None:
        raise Unknown(f"{call.name} removes every axis of length 1, the batch's too if it has one row")
    return named(call, rank)


def of_batch_norm(call: Call, rank: int) -> Iterable[int]:
    by_batch = call.arg("training") or call.arg("running_mean") is None
    return range(rank) if by_batch and not call.trains else within(call, rank)


def all_unless(equal: Callable[[Call], bool]) -> Axes:
    return lambda call, rank: () if equal(call) else range(rank)


same = Along()
