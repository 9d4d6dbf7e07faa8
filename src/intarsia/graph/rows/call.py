"""One operator at a batch size, with its arguments and the axes of the batch in them."""

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
    """A number computed from the batch size: a multiple of it, or something else (`times` is None).

    A multiple may be used as a size. `min(size, 8)` may not, although it equals the size of a small batch.
    """

    times: int | None


@dataclass(frozen=True)
class Summary:
    """A value computed from all rows, without an axis for them; `made_by` names the node."""

    made_by: str


Placement = Rows | Numbers | Size | Summary | None
"""Where the batch is in a value; None in a value that is the same for every batch."""


class Call:
    """An operator with its arguments by name, their values, and where the batch is in them."""

    def __init__(
        self,
        node: fx.Node,
        size: int,
        result: Any,
        values: Mapping[fx.Node, Any],
        placed: Mapping[fx.Node, Any],
        trains: bool = False,
    ) -> None:
        self.node: fx.Node = node
        self.size: int = size
        self.result: Any = result
        self.trains = trains  # in training, random numbers and batch statistics do not count as mixing
        self._values, self._placed = values, placed
        schema = getattr(node.target, "_schema", None)
        self.name: str = str(node.target) if schema is None else str(schema.name)
        self.tags: Sequence[torch.Tag] = getattr(node.target, "tags", ())
        self._order, self._arguments = _bound(node)

    def arg(self, name: str, default: Any = None) -> Any:
        """The value of an argument."""
        argument = self._arguments.get(name, default)
        return fx.node.map_arg(argument, self._values.__getitem__)

    def of(self, name: str) -> Any:
        """Where the batch is in an argument, or in each item of a list."""
        return self._where(self._arguments.get(name))

    def _where(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._placed[argument]
        return [self._where(item) for item in argument] if isinstance(argument, list | tuple) else None

    def operands(self) -> list[tuple[torch.Tensor, Placement]]:
        """Every tensor among the arguments, and where the batch is in it."""
        nodes: list[fx.Node] = []
        for argument in self._arguments.values():
            fx.node.map_arg(argument, nodes.append)
        return [
            (self._values[n], self._placed[n]) for n in nodes if isinstance(self._values[n], torch.Tensor)
        ]

    def sizes(self) -> list[str]:
        """The names of arguments that contain a number computed from the batch size."""
        return [name for name in self._arguments if _holds(self.of(name), Size)]

    def inexact(self) -> bool:
        """Whether one of these numbers is no multiple of the batch size."""
        places = [self.of(name) for name in self.sizes()]
        flat = [item for one in places for item in (one if isinstance(one, list | tuple) else [one])]
        return Size(None) in flat

    def numbers(self) -> list[str]:
        """The names of arguments that contain indices of rows."""
        return [name for name in self._arguments if _holds(self.of(name), Numbers)]

    def first(self) -> str:
        """The name of the first argument, which is `self` or `input`."""
        return next(iter(self._order))

    def only(self, *names: str) -> None:
        """Raise Unknown if the batch is in another argument than these."""
        for name in self._arguments:
            if name not in names and self.of(name) is not None and _holds(self.of(name), Rows):
                raise Unknown(f"{self.name} takes its {name} from the rows")

    def rows(self, name: str) -> Rows:
        """Where the batch is in an argument that must have it."""
        place = self.of(name)
        if not isinstance(place, Rows):
            raise Unknown(f"{self.name} takes rows into an argument other than {name}")
        return place

    def at(self, axis: int, result: torch.Tensor | None = None) -> Rows:
        """The batch at this axis of the result, folded with the same outer axis as in the arguments."""
        outer = {where.outer for _, where in self.operands() if isinstance(where, Rows)} or {1}
        if len(outer) > 1:
            raise Unknown(f"{self.name} takes batches that are folded in different ways")
        return self.folded(axis, outer.pop(), result)

    def folded(self, axis: int, outer: int, result: torch.Tensor | None = None) -> Rows:
        """The batch at this axis of the result, inside an outer axis of this length."""
        places = (self.result if result is None else result).shape[axis]
        length, rest = divmod(places, self.size * outer)
        if rest or not length:
            raise Unknown(f"{self.name} makes {places} places of {self.size} rows")
        return Rows(axis, length, outer)

    def everywhere(self, axis: int) -> Any:
        """The batch at this axis of every result."""
        if isinstance(self.result, torch.Tensor):
            return self.at(axis)
        return tuple(self.at(axis, result) for result in self.result)


def _holds(place: Any, kind: type) -> bool:
    several = isinstance(place, list | tuple)
    return any(_holds(item, kind) for item in place) if several else isinstance(place, kind)


def _bound(node: fx.Node) -> tuple[list[str], dict[str, Any]]:
    """The names in the operator's schema, or numbers if it has none, and the arguments by these names."""
    if hasattr(node.target, "_schema"):
        bound = arguments(node)
        return list(bound), bound
    names = [str(i) for i in range(len(node.args))]
    return names, dict(zip(names, node.args, strict=True)) | node.kwargs
