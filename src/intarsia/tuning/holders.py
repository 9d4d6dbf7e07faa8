"""The modules an object holds: a pipeline, a service, a dictionary of models, a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_DEPTH = 6  # attributes of attributes, and so on
_MOST = 50_000  # objects looked at


def held_modules(target: Any) -> dict[str, nn.Module]:
    """Every module in an object, by a path that a reader can follow; each module once.

    >>> class Service:
    ...     def __init__(self):
    ...         self.models = {"small": nn.Sequential(nn.Linear(2, 2))}
    >>> list(held_modules(Service()))
    ["models['small']", "models['small'].0"]
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, module in _roots(target, "", _DEPTH, set()):
        for inner, part in module.named_modules():
            if id(part) not in seen:
                seen.add(id(part))
                found[".".join(filter(None, (path, inner))) or type(part).__name__] = part
    return found


def _roots(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, value
        return
    if not depth or isinstance(value, (str, bytes, int, float, type, ModuleType)) or value is None:
        return
    for name, item in _parts(value, path):
        yield from _roots(item, name, depth - 1, seen)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield path, value.__self__
    elif isinstance(value, FunctionType):
        for name in value.__code__.co_names:  # a handler of a service finds its model among the globals
            if name in value.__globals__:
                yield name, value.__globals__[name]
        for cell, name in zip(value.__closure__ or (), value.__code__.co_freevars, strict=False):
            try:
                yield f"{path}.{name}" if path else name, cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        held = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        for name, item in held.items():
            yield f"{path}.{name}" if path else name, item


def _slots(kind: type) -> tuple[str, ...]:
    """The attributes that a class keeps outside of `__dict__`, under the names that `getattr` knows."""
    named = kind.__dict__.get("__slots__", ())
    found = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in found if not name.startswith("__"))
