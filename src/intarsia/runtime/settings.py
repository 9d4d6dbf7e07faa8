"""Plain attributes of modules, which a model's code reads and a program has taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, starmap
from operator import call, is_, itemgetter
from typing import Any

from torch import nn

# What torch keeps in a module itself: parameters, children, hooks and the like are watched elsewhere.
_TORCHS = frozenset({*vars(nn.Module()), "training", "forward"})
_GONE = object()


@dataclass(frozen=True)
class _Held:
    """The plain attributes of one object, read at once."""

    path: str
    table: dict[str, Any]
    names: list[str]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]


class Settings:
    """Whether modules, and the configurations they share, hold the same plain values as before.

    A program knows numbers, flags and functions as they were when it was compiled: `module.scale = 5.0` or
    `vae.enable_tiling()` must be seen. What is replaced is seen, and what changes inside a configuration; not
    what changes inside another object, nor names that begin with an underscore or come to be later, but for a
    `forward` that is none of `ours`.
    """

    def __init__(self, root: nn.Module, ours: type) -> None:
        self._ours = ours
        inner = [(path, vars(part)) for path, part in root.named_modules() if part is not root]
        self._own_forward = [(path, table) for path, table in inner if "forward" not in table]
        self._held = [_held(path, table) for path, table in _tables(root) if _names(table)]
        self._reads = [(held.read, held.table) for held in self._held]
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
            if "forward" in table and not isinstance(table["forward"], self._ours):
                return f"{path}.forward"
        return None

    def _read(self) -> Iterator[Any]:
        return chain.from_iterable(starmap(call, self._reads))

    def _other(self) -> str | None:
        """The first name that has another value; where all are equal, they are the values from now on."""
        before = iter(self._values)
        for held in self._held:
            for name in held.names:
                if not _same(held.table.get(name, _GONE), next(before)):
                    return f"{held.path}.{name}".lstrip(".")
        self._values = list(self._read())
        return None


def _tables(root: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    configs: set[int] = set()
    for path, part in root.named_modules():
        if type(part) is nn.Linear:  # whose sizes are for show
            continue
        yield path, vars(part)
        config = vars(part).get("config")
        if hasattr(config, "__dict__") and id(config) not in configs:
            configs.add(id(config))
            yield f"{path}.config", vars(config)


def _held(path: str, table: dict[str, Any]) -> _Held:
    names = _names(table)
    names = names if len(names) > 1 else names * 2  # of one name, itemgetter gives no tuple
    return _Held(path, table, names, itemgetter(*names))


def _names(table: dict[str, Any]) -> list[str]:
    return [name for name in table if name not in _TORCHS and not name.startswith("_")]


def _same(now: Any, before: Any) -> bool:
    """Whether two values are the same to a program: 2 and 2.0 are not, nor are 0.0 and -0.0."""
    if now is before:
        return True
    try:
        return type(now) is type(before) and bool(now == before) and repr(now) == repr(before)
    except Exception:  # a tensor does not say whether it equals another
        return False
