"""Plain attributes of modules that the model's code reads, and a program has as constants.

A tuned module is part of a user's program, which may set flags at any time. Values are compared by identity
first, which runs in C, and by type and value only if the object differs: 2 and 2.0, or 0.0 and -0.0, are
different to a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from operator import call, is_, itemgetter
from typing import Any

from torch import nn

Table = dict[str, Any]

# Attributes of every module: parameters, children, hooks and others, which are watched elsewhere.
_OF_TORCH = frozenset({*vars(nn.Module()), "training", "forward"})
_MISSING = object()


class Replacement:
    """A forward that intarsia sets on a module. It answers as the module's own, so it is not a change."""


@dataclass(frozen=True)
class Attributes:
    """The plain attributes of one module or configuration."""

    path: str
    table: Table
    names: list[str]
    has_own_forward: bool  # the forward is that of the class, so one in the table is a change

    @property
    def read(self) -> Callable[[Table], tuple[Any, ...]]:
        """A function that reads all of them at once."""
        # For one name, itemgetter returns no tuple.
        return itemgetter(*(self.names if len(self.names) > 1 else self.names * 2))


def attributes_of(root: nn.Module, *, in_place: bool) -> Iterator[Attributes]:
    """The attributes of a model's modules. With `in_place`, intarsia replaces the root's forward."""
    configs: set[int] = set()
    for path, part in root.named_modules():
        table = vars(part)
        names = [] if type(part) is nn.Linear else _names(table)  # the sizes of a Linear have no effect
        yield Attributes(path, table, names, "forward" not in table and not (in_place and part is root))
        config = table.get("config")
        if hasattr(config, "__dict__") and id(config) not in configs:
            configs.add(id(config))
            yield Attributes(f"{path}.config", vars(config), _names(vars(config)), False)


class Settings:
    """Whether modules, and the configurations they share, have the same plain values as before.

    A program has numbers, flags and functions as constants, so `module.scale = 5.0` or `vae.enable_tiling()`
    must be detected. Replaced attributes are detected, also those of a configuration. Not detected are
    changes inside other objects; names that begin with an underscore, unless they hold a flag or a list of
    names; and attributes added later, except a `forward` that is no `Replacement`.
    """

    def __init__(self, attributes: Sequence[Attributes]) -> None:
        self._own_forward = [(one.path, one.table) for one in attributes if one.has_own_forward]
        self._attributes = [one for one in attributes if one.names]
        self._reads = [(one.read, one.table) for one in self._attributes]
        self._values = list(self._read())

    def changed(self) -> str | None:
        """The name of an attribute whose value has changed; None if there is none."""
        try:
            is_unchanged = all(map(is_, self._read(), self._values))  # runs in C, since every call does this
        except KeyError:  # an attribute was deleted
            is_unchanged = False
        if not is_unchanged and (name := self._changed_name()) is not None:
            return name
        for path, table in self._own_forward:
            if "forward" in table and not isinstance(table["forward"], Replacement):
                return f"{path}.forward".lstrip(".")
        return None

    def _read(self) -> Iterator[Any]:
        return chain.from_iterable(starmap(call, self._reads))

    def _changed_name(self) -> str | None:
        """The first name with another value. If none has, later calls compare with the current objects."""
        before = iter(self._values)
        for one in self._attributes:
            # One name is read twice.
            for name in one.names if len(one.names) > 1 else one.names * 2:
                if not _same(one.table.get(name, _MISSING), next(before)):
                    return f"{one.path}.{name}".lstrip(".")
        self._values = list(self._read())
        return None


def _names(table: Table) -> list[str]:
    return [
        name
        for name, value in table.items()
        if name not in _OF_TORCH and (not name.startswith("_") or _is_switch(value))
    ]


def _is_switch(value: Any) -> bool:
    """Whether a value under a name with an underscore is a switch, as of peft's adapters, and no cache."""
    return isinstance(value, bool) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    )


def _same(now: Any, before: Any) -> bool:
    """Whether two values are the same to a program, which 2 and 2.0, or 0.0 and -0.0, are not."""
    if now is before:
        return True
    try:
        return type(now) is type(before) and bool(now == before) and repr(now) == repr(before)
    except Exception:  # tensors are not compared
        return False
