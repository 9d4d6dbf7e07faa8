"""Plain attributes of modules, which a model's code reads and a program has taken in.

A tuned module stands in somebody else's program, which sets flags where it likes. Values are compared by
identity first, at the speed of C, and by kind and value only where the object differs: 2 and 2.0, or 0.0 and
-0.0, are not the same to a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from operator import call, is_, itemgetter
from typing import Any

from torch import nn

Table = dict[str, Any]

# What torch keeps in a module itself: parameters, children, hooks and the like are watched elsewhere.
_TORCHS = frozenset({*vars(nn.Module()), "training", "forward"})
_GONE = object()


class Replacement:
    """A forward that intarsia puts into a module: it answers as the module's own, so it is no change."""


@dataclass(frozen=True)
class Attributes:
    """The plain attributes of one module or configuration; of a module, also whether it gets a forward."""

    path: str
    table: Table
    names: list[str]
    has_own_forward: bool  # the class's, so that another in the table is a change

    @property
    def read(self) -> Callable[[Table], tuple[Any, ...]]:
        """Reads all of them at once."""
        # Of one name, itemgetter gives no tuple.
        return itemgetter(*(self.names if len(self.names) > 1 else self.names * 2))


def attributes_of(root: nn.Module, *, in_place: bool) -> Iterator[Attributes]:
    """The attributes of a model's modules; `in_place`, the root's forward is replaced by ourselves."""
    configs: set[int] = set()
    for path, part in root.named_modules():
        table = vars(part)
        names = [] if type(part) is nn.Linear else _names(table)  # whose sizes are for show
        yield Attributes(path, table, names, "forward" not in table and not (in_place and part is root))
        config = table.get("config")
        if hasattr(config, "__dict__") and id(config) not in configs:
            configs.add(id(config))
            yield Attributes(f"{path}.config", vars(config), _names(vars(config)), False)


class Settings:
    """Whether modules, and the configurations they share, hold the same plain values as before.

    A program knows numbers, flags and functions as they were when it was compiled: `module.scale = 5.0` or
    `vae.enable_tiling()` must be seen. What is replaced is seen, and what changes inside a configuration; not
    what changes inside another object, nor names that begin with an underscore or come to be later, but for a
    `forward` that is no `Replacement`.
    """

    def __init__(self, attributes: Sequence[Attributes]) -> None:
        self._own_forward = [(one.path, one.table) for one in attributes if one.has_own_forward]
        self._held = [one for one in attributes if one.names]
        self._reads = [(one.read, one.table) for one in self._held]
        self._values = list(self._read())

    def changed(self) -> str | None:
        """The name of an attribute that is another one now; None where there is none."""
        try:
            as_before = all(map(is_, self._read(), self._values))  # at every call, so at the speed of C
        except KeyError:  # one is gone
            as_before = False
        if not as_before and (name := self._other()) is not None:
            return name
        for path, table in self._own_forward:
            if "forward" in table and not isinstance(table["forward"], Replacement):
                return f"{path}.forward".lstrip(".")
        return None

    def _read(self) -> Iterator[Any]:
        return chain.from_iterable(starmap(call, self._reads))

    def _other(self) -> str | None:
        """The first name that has another value; where all are equal, they are the values from now on."""
        before = iter(self._values)
        for one in self._held:
            # One name is read twice.
            for name in one.names if len(one.names) > 1 else one.names * 2:
                if not _same(one.table.get(name, _GONE), next(before)):
                    return f"{one.path}.{name}".lstrip(".")
        self._values = list(self._read())
        return None


def _names(table: Table) -> list[str]:
    return [name for name in table if name not in _TORCHS and not name.startswith("_")]


def _same(now: Any, before: Any) -> bool:
    """Whether two values are the same to a program: 2 and 2.0 are not, nor are 0.0 and -0.0."""
    if now is before:
        return True
    try:
        return type(now) is type(before) and bool(now == before) and repr(now) == repr(before)
    except Exception:  # a tensor does not say whether it equals another
        return False
