"""Plain attributes of modules, which a model's code reads and a program has taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

# What torch keeps in a module itself: parameters, children, hooks and the like are watched elsewhere.
_TORCHS = frozenset({*vars(nn.Module()), "training", "forward"})
_GONE = object()


class _Held(NamedTuple):
    path: str
    table: dict[str, Any]
    names: list[str]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]


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

    def changed(self) -> str | None:
        """The name of an attribute that is another one now; None where there is none."""
        for path, table, names, read, values in self._held:  # at every call; the same object is equal at once
            try:
                if read(table) == values:
                    continue
            except Exception:  # it is gone, or a tensor, which does not say whether it equals another
                pass
            for name, value in zip(names, values):  # noqa: B905  (one is read twice)
                if not _equal(table.get(name, _GONE), value):
                    return f"{path}.{name}".lstrip(".")
        for path, table in self._own_forward:
            if "forward" in table and not isinstance(table["forward"], self._ours):
                return f"{path}.forward"
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
    read = itemgetter(*names, names[0])  # of two names at least, so that it gives a tuple
    return _Held(path, table, names, read, read(table))


def _names(table: dict[str, Any]) -> list[str]:
    return [name for name in table if name not in _TORCHS and not name.startswith("_")]


def _equal(now: Any, before: Any) -> bool:
    if now is before:
        return True
    try:
        return bool(now == before)
    except Exception:
        return False
