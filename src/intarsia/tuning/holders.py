"""The modules in an object (a pipeline, a service, a dictionary of models), and which of them call which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_DEPTH = 6  # of attributes of attributes
_MOST = 50_000  # objects that are visited


def held_modules(target: Any) -> dict[str, nn.Module]:
    """Every module in an object, once, by a path that describes where it is.

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
        for name in value.__code__.co_names:  # a service's handler may use a global model
            if name in value.__globals__:
                yield name, value.__globals__[name]
        for cell, name in zip(value.__closure__ or (), value.__code__.co_freevars, strict=False):
            try:
                yield f"{path}.{name}" if path else name, cell.cell_contents
            except ValueError:  # a variable without a value
                continue
    else:
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        for name, item in attributes.items():
            yield f"{path}.{name}" if path else name, item


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names that `getattr` takes."""
    named = kind.__dict__.get("__slots__", ())
    slots = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in slots if not name.startswith("__"))


@dataclass
class CallTree:
    """The seconds spent in each module, including its submodules, and its callers (None: other code)."""

    total: float = 0.0
    seconds: dict[nn.Module, float] = field(default_factory=dict)
    callers: dict[nn.Module, set[nn.Module | None]] = field(default_factory=dict)

    def share(self, module: nn.Module) -> float:
        """The share of the whole run that was spent in a module."""
        return self.seconds.get(module, 0.0) / self.total if self.total else 0.0

    def called_by(self, caller: nn.Module | None) -> list[nn.Module]:
        """The modules that `caller` called, the slowest first; for None, those that other code called."""
        modules = [module for module, callers in self.callers.items() if caller in callers]
        return sorted(modules, key=lambda module: -self.seconds.get(module, 0.0))


_LEAST_S, _MOST_RUNS = 0.2, 5  # a shorter call is repeated, to limit noise


def call_tree(modules: Iterable[nn.Module], call: Callable[[], object]) -> CallTree:
    """Run `call`, several times if it is short, and record the calls of these modules.

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
        while stack:  # a module that raised may have left entries
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
