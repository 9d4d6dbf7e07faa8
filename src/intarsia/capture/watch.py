"""Hooks around the calls of a module: what they were given, how long they took, what they did to it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from intarsia.capture.run_effects import shape_of_call

T = TypeVar("T")


class Ended(NamedTuple):
    """How a call ended."""

    seconds: float
    fills: bool  # it put something into a list, dictionary or cache that it was given
    failed: bool  # the module raised an exception


class _Running(NamedTuple):
    value: Any  # what `begin` returned
    nested: Any
    error: BaseException | None  # that was being handled when the call began
    start: float


def watch_calls(
    module: nn.Module,
    begin: Callable[[tuple[Any, ...], dict[str, Any]], T],
    end: Callable[[T, Ended], None],
) -> list[RemovableHandle]:
    """Before each call of the module `begin(args, kwargs)`, and after it `end(what begin returned, how)`."""
    running = threading.local()

    def before(_: nn.Module, args: tuple[Any, ...], *rest: dict[str, Any]) -> None:
        if not rest:  # the hook was removed while the call began
            return
        value = begin(args, rest[0])
        stack: list[_Running] = running.__dict__.setdefault("stack", [])
        nested = shape_of_call(args, rest[0])
        stack.append(_Running(value, nested, sys.exc_info()[1], time.perf_counter()))

    def after(_: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs = rest[0] if len(rest) > 1 else {}  # they are left out where the hook was removed meanwhile
        stack: list[_Running] = running.__dict__.get("stack", [])
        if not stack:
            return
        now, call, error = time.perf_counter(), stack.pop(), sys.exc_info()[1]
        failed = error is not None and error is not call.error
        fills = not failed and call.nested != shape_of_call(args, kwargs)
        end(call.value, Ended(now - call.start, fills, failed))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
