"""One operator at two batch sizes: its arguments, and the axes of the batch in them and in its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.lower.purity import arguments


class Mixes(Exception):
    """Rows are not independent here. The message is a clause."""


class Unknown(Mixes):
    """Whether rows are independent here is not known."""


class Reduced(Mixes):
    """One value is computed from all rows. Rows are mixed only if it is used with rows again."""


@dataclass(frozen=True)
class Rows:
    """An axis that holds the batch, alone or folded with others: its size is `outer` x rows x `length`."""

    axis: int
    length: int = 1
    outer: int = 1


@dataclass(frozen=True)
class Numbers:
    """An axis that holds the numbers 0, 1, 2 ... of the rows. They may only select each row itself."""

    axis: int


@dataclass(frozen=True)
class Size:
    """A number computed from the batch size: a multiple of it, or something else.

    A multiple may be used as a size. `min(size, 8)` may not, although it equals the size of a small batch.
    """

    is_multiple: bool


@dataclass(frozen=True)
class Summary:
    """A value computed from all rows, without an axis for them; `made_by` names the node."""

    made_by: str


Placement = Rows | Numbers | Size | Summary | None
"""Where the batch is in a value; None in a value that is the same for every batch."""


class Call:
    """An operator with its arguments by name, their values, and where the batch is in them.

    `sizes` are two batch sizes, and `values` the values of all nodes at each. Values are those at the first
    size. Tensors are on the meta device, since only their shapes matter.
    """

    def __init__(
        self,
        node: fx.Node,
        sizes: Sequence[int],
        values: Sequence[Mapping[fx.Node, Any]],
        placed: Mapping[fx.Node, Any],
        trains: bool,
    ) -> None:
        self.node: fx.Node = node
        self.results: list[Any] = [at_size[node] for at_size in values]
        self.trains = trains  # in training, random numbers and batch statistics do not count as mixing
        self._sizes, self._values, self._placed = sizes, values[0], placed
        schema = getattr(node.target, "_schema", None)
        self.name: str = str(node.target) if schema is None else str(schema.name)
        self.tags: Sequence[torch.Tag] = getattr(node.target, "tags", ())
        if schema is not None:
            self._arguments = arguments(node)
        else:
            self._arguments = {str(i): argument for i, argument in enumerate(node.args)} | node.kwargs

    def arg(self, name: str) -> Any:
        """The value of an argument; None if the operator has no argument of this name."""
        return fx.node.map_arg(self._arguments.get(name), self._values.__getitem__)

    def of(self, name: str) -> Any:
        """Where the batch is in an argument, or in each item of a list."""
        return self._where(self._arguments.get(name))

    def _where(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._placed[argument]
        return [self._where(item) for item in argument] if isinstance(argument, list | tuple) else None

    @property
    def names(self) -> list[str]:
        """The names of the arguments, in the order of the schema."""
        return list(self._arguments)

    def places(self, *without: str) -> list[Placement]:
        """Where the batch is in each value among the arguments, without those of these names."""
        return flat([self.of(name) for name in self._arguments if name not in without])

    def axis(self, name: str, *others: str) -> int:
        """The axis of the batch in this argument. Unknown if only an argument besides `others` has rows."""
        place = self.of(name)
        elsewhere = any(isinstance(one, Rows) for one in self.places(name, *others))
        if elsewhere or not isinstance(place, Rows | Numbers):
            raise Unknown(f"{self.name} takes rows into an argument other than {name}")
        return place.axis

    def kept(self) -> Any:
        """The batch in each result, folded with the same outer axis as in the arguments."""
        outer = {where.outer for where in self.places() if isinstance(where, Rows)} or {1}
        if len(outer) > 1:
            raise Unknown(f"{self.name} takes batches that are folded in different ways")
        return self.folded(outer.pop())

    def folded(self, outer: int) -> Any:
        """The batch in each result, at the axis that grows with it, inside an outer axis of this length."""
        if isinstance(self.results[0], list | tuple):
            places: Any = tuple(self._folded(column, outer) for column in zip(*self.results, strict=True))
        else:
            places = self._folded(self.results, outer)
        if not any(flat([places])):
            raise Unknown(f"{self.name} makes nothing with an axis of the batch")
        return places

    def _folded(self, values: Sequence[Any], outer: int) -> Rows | None:
        axes = grown_axes(values)
        if len(axes) > 1:
            raise Mixes(f"{self.name} puts the batch along two axes: it combines different rows")
        for axis in axes:
            places = [
                (value.shape[axis], size * outer) for value, size in zip(values, self._sizes, strict=True)
            ]
            length = places[0][0] // places[0][1]
            if any(count != length * rows for count, rows in places):
                raise Unknown(f"{self.name} makes {places[0][0]} places of {self._sizes[0]} rows")
            return Rows(axis, length, outer)
        return None


def grown_axes(values: Sequence[Any]) -> list[int]:
    """The axes that are longer for a larger batch, from a value at two batch sizes; none for a number."""
    if not isinstance(values[0], torch.Tensor):
        return []
    shapes = [value.shape for value in values]
    if len({*map(len, shapes)}) > 1:
        raise Unknown("the number of axes depends on the size of the batch")
    return [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if len({*lengths}) > 1]


def flat(places: Sequence[Any]) -> list[Any]:
    """The placements in nested lists."""
    return [item for one in places for item in (flat(one) if isinstance(one, list | tuple) else [one])]
