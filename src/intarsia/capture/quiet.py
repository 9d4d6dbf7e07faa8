"""What torch writes to stderr while it exports: kept for the log, not shown.

Where an export fails, torch prints the graph it has so far, and warns; the reason is in its exception, which
is told. `logging.getLogger("intarsia.torch")` has the rest at DEBUG. With TORCH_LOGS set, all is shown.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from intarsia.logs import TORCH_LOG, torch_logs_kept


@contextmanager
def kept_messages() -> Iterator[None]:
    """While this holds, what torch writes to stderr in this thread goes to the log."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    stderr, thread, text = sys.stderr, threading.get_ident(), io.StringIO()
    sys.stderr = _Parted(stderr, thread, text)
    try:
        with torch_logs_kept():
            yield
    finally:
        sys.stderr = stderr
        if text.getvalue():
            TORCH_LOG.debug("torch wrote while it exported:\n%s", text.getvalue())


class _Parted:
    """stderr, but for what one thread writes."""

    def __init__(self, stream: TextIO, thread: int, text: io.StringIO) -> None:
        self._stream, self._thread, self._text = stream, thread, text

    def write(self, text: str) -> int:
        return (self._text if threading.get_ident() == self._thread else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
