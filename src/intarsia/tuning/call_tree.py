"""Which modules a run of the user's code calls, how long they take, and which call which."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


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
        found = [module for module, callers in self.callers.items() if caller in callers]
        return sorted(found, key=lambda module: -self.seconds.get(module, 0.0))


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
        while stack:  # a module that raised may have left others behind
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
