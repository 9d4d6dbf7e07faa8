"""The modules an object holds (a pipeline, a service, a dictionary of models), and who calls whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    modules: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, module in _roots(target, "", _DEPTH, set()):
        for inner, part in module.named_modules():
            if id(part) not in seen:
                seen.add(id(part))
                modules[".".join(filter(None, (path, inner))) or type(part).__name__] = part
    return modules


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
    slots = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in slots if not name.startswith("__"))


@dataclass
class CallTree:
    """Seconds spent in each module, those within it included, and who called it (None: nobody of these)."""

    total: float = 0.0
    seconds: dict[nn.Module, float] = field(default_factory=dict)
    callers: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)

    def share(self, module: nn.Module) -> float:
        """The share of the whole run that was spent in a module."""
        return self.seconds.get(module, 0.0) / self.total if self.total else 0.0

    def called_by(self, caller: nn.Module | None) -> list[nn.Module]:
        """The modules that `caller` called, the most costly first; None: that nobody of these called."""
        modules = [module for module, callers in self.callers.items() if caller in callers]
        return sorted(modules, key=lambda module: -self.seconds.get(module, 0.0))


_LEAST_S, _MOST_RUNS = 0.2, 5  # a short call is run again, lest noise decide


def call_tree(modules: Iterable[nn.Module], call: Callable[[], object]) -> CallTree:
    """Run `call`, a short one several times, and note the calls of these modules.

    >>> import torch
    >>> inner = nn.ReLU()
    >>> outer = nn.Sequential(inner)
    >>> tree = call_tree([outer, inner], lambda: outer(torch.ones(1)))
    >>> tree.called_by(None) == [outer], tree.called_by(outer) == [inner]
    (True, True)
    """
    tree, running = CallTree(), threading.local()

    def before(module: nn.Module, _: Any) -> None:
        stack: list[tuple[nn.Module, float]] = running.__dict__.setdefault("stack", [])
        tree.callers.setdefault(module, set()).add(stack[-1][0] if stack else None)
        stack.append((module, time.perf_counter()))

    def after(module: nn.Module, _: Any, __: Any) -> None:
        stack = running.__dict__.get("stack", [])
        while stack:  # a module that raised may have left others here
            popped, start = stack.pop()
            if popped is module:
                tree.seconds[module] = tree.seconds.get(module, 0.0) + time.perf_counter() - start
                return

    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    start = time.perf_counter()
    try:
        for _ in range(_MOST_RUNS):
            call()
            if time.perf_counter() - start > _LEAST_S:
                break
    finally:
        for handle in handles:
            handle.remove()
    tree.total = time.perf_counter() - start
    return tree
