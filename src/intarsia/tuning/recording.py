"""`recording`: the calls of a module while the user's own code runs."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from intarsia.errors import InputError
from intarsia.tuning.recorded import CallsOfKind, Recorded, Sizes, nesting, sizes_of


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


class _Running(NamedTuple):
    kind: CallsOfKind
    sizes: Sizes
    nested: Any
    error: BaseException | None  # that was being handled when the call began
    start: float


def watch(module: nn.Module, calls: Recorded) -> list[RemovableHandle]:
    """Hooks that add every call of the module to `calls`, but for those that raise."""
    running = threading.local()

    def before(_: nn.Module, args: tuple[Any, ...], *rest: dict[str, Any]) -> None:
        if not rest:  # the hook was removed while the call began
            return
        kwargs = rest[0]
        kind = calls.begin(args, kwargs)
        stack: list[_Running] = running.__dict__.setdefault("stack", [])
        given = sizes_of(args, kwargs), nesting(args, kwargs)
        stack.append(_Running(kind, *given, sys.exc_info()[1], time.perf_counter()))

    def after(_: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs = rest[0] if len(rest) > 1 else {}  # they are left out where the hook was removed meanwhile
        stack: list[_Running] = running.__dict__.get("stack", [])
        if not stack:
            return
        end, ended = time.perf_counter(), stack.pop()
        error = sys.exc_info()[1]
        if error is not None and error is not ended.error:  # the module raised it
            calls.failed(ended.kind, ended.sizes)
        else:
            calls.end(ended.kind, end - ended.start, ended.nested != nesting(args, kwargs))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
