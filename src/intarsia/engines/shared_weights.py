"""Files of packed weights that the programs of one model share, while they are built or loaded."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any


class SharedWeights:
    """A folder for packed weights, and where each lies in it, by its contents."""

    def __init__(self, cleanup: ExitStack) -> None:
        self._cleanup = cleanup
        self.places: dict[bytes, Any] = {}
        self.problem: str | None = None  # why no more weights are written
        self.lock = threading.Lock()  # a file is loaded by two threads

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user."""
        return () if self.problem is None else (f"programs do not share packed weights: {self.problem}",)

    @cached_property
    def folder(self) -> str:
        """The folder, which is made when it is needed."""
        # Windows does not delete mapped files. Other systems keep their contents as long as they are mapped.
        folder = tempfile.TemporaryDirectory(prefix="intarsia_weights_", ignore_cleanup_errors=True)
        return self._cleanup.enter_context(folder)


_shared: ContextVar[SharedWeights | None] = ContextVar("shared weights", default=None)


@contextmanager
def sharing_weights() -> Iterator[SharedWeights]:
    """A block in which engines may put packed weights into files, which the programs built in it share."""
    with ExitStack() as cleanup:
        shared = SharedWeights(cleanup)
        token = _shared.set(shared)
        try:
            yield shared
        finally:
            _shared.reset(token)


def shared_weights() -> SharedWeights | None:
    """The files of the block that runs; None outside a block."""
    return _shared.get()
