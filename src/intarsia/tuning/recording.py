"""`recording`: the calls of a module while the user's own code runs."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from intarsia.errors import InputError
from intarsia.tuning.recorded import CallsOfKind, Recorded, nesting


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorded]:
    """Record how a model is called inside the block: arguments, shapes, dtypes and times.

    >>> import torch, intarsia
    >>> model = nn.Linear(4, 2)
    >>> with recording(model) as calls:
    ...     for size in (2, 3, 5):
    ...         _ = model(torch.ones(size, 4))
    >>> calls.total, calls.args[0].shape
    (3, torch.Size([2, 4]))
    >>> fast = intarsia.compile(model, calls.args, calls.kwargs, dynamic_shapes=calls.dynamic_shapes)
    >>> fast(torch.ones(4, 4)).shape
    torch.Size([4, 2])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"recording(...) takes a module, not a {type(model).__name__}")
    calls = new_recorded(model)
    handles = watch(model, calls)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def new_recorded(module: nn.Module) -> Recorded:
    """No call yet, of this module."""
    return Recorded(inspect.signature(module.forward))


def watch(module: nn.Module, calls: Recorded) -> list[RemovableHandle]:
    """Hooks that add every call of the module to `calls`."""
    running = threading.local()

    def before(_: nn.Module, args: tuple[Any, ...], *rest: dict[str, Any]) -> None:
        if not rest:  # the hook was removed while the call began
            return
        kwargs = rest[0]
        kind = calls.begin(args, kwargs)
        stack: list[tuple[CallsOfKind, Any, float]] = running.__dict__.setdefault("stack", [])
        stack.append((kind, nesting(args, kwargs), time.perf_counter()))

    def after(_: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs = rest[0] if len(rest) > 1 else {}  # torch leaves them out where the module raised
        stack = running.__dict__.get("stack")
        if stack:
            end = time.perf_counter()
            kind, given, start = stack.pop()
            calls.end(kind, end - start, given != nesting(args, kwargs))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
