"""The line of the user's code that a node comes from, found without reading the whole stack for each node.

While it exports, torch writes down for every node the stack of the model's code. For that it reads the whole
stack, source lines and the caller's frames included, and drops most of it, which takes a large part of
an export. Here the stack is followed only up to the innermost `forward`.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.fx.proxy

_NAME = "CapturedTraceback"  # private to torch; where it is gone, export takes its time
_lock = threading.Lock()
_users = 0  # threads that export now
_own: Any = None  # what torch reads stacks with


@contextmanager
def short_stack_traces() -> Iterator[None]:
    """While this holds, nodes are given the end of the stack that torch gives them: the same last line."""
    global _users, _own
    with _lock:
        if not _users:
            _own = getattr(torch.fx.proxy, _NAME, None)
        if not _users and _own is not None:
            setattr(torch.fx.proxy, _NAME, _EndOfStack)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _own is not None:
                setattr(torch.fx.proxy, _NAME, _own)


class _EndOfStack:
    """What the tracer asks of a stack: where a node was made, from the innermost `forward` inwards.

    No frame is kept: tensors of the trace would live on in it, and torch asks which of them do.
    """

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls, *, skip: int = 0) -> _EndOfStack:
        frames = []
        frame: FrameType | None = sys._getframe(1 + skip)
        while frame is not None:
            code = frame.f_code
            # An empty line is not looked up, and not shown.
            frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, line=""))
            frame = None if code.co_name == "forward" else frame.f_back
        return cls(frames)

    def summary(self) -> traceback.StackSummary:
        """Outermost frame first; the tracer drops its own files from it."""
        return traceback.StackSummary.from_list(self.frames[::-1])
