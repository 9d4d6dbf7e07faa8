"""Hooks around the calls of a module: what they were given, how long they took, what they did to it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from intarsia.capture.run_effects import shape_of_call


class Ended(NamedTuple):
    """How a call ended."""

    seconds: float
    fills: bool  # it put something into a list, dictionary or cache that it was given
    failed: bool  # the module raised an exception


def watch_calls(
    module: nn.Module, begin: Callable[[tuple[Any, ...], dict[str, Any]], Callable[[Ended], None]]
) -> list[RemovableHandle]:
    """Hooks: `begin(args, kwargs)` before each call of the module, and after it what `begin` returned."""
    running = threading.local()

    def before(_: nn.Module, args: tuple[Any, ...], *rest: dict[str, Any]) -> None:
        if not rest:  # the hook was removed while the call began
            return
        end, nested, handled = begin(args, rest[0]), shape_of_call(args, rest[0]), sys.exc_info()[1]
        running.__dict__.setdefault("stack", []).append((end, nested, handled, time.perf_counter()))

    def after(_: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs = rest[0] if len(rest) > 1 else {}  # they are left out where the hook was removed meanwhile
        if not running.__dict__.get("stack"):
            return
        now, error = time.perf_counter(), sys.exc_info()[1]
        end, nested, handled, start = running.stack.pop()
        failed = error is not None and error is not handled
        end(Ended(now - start, not failed and nested != shape_of_call(args, kwargs), failed))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
