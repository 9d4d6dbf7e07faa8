"""MNN's library, which prints to the standard output of the process."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@functools.cache
def library() -> Any:
    with silent_stdout():
        import MNN.nn
    return MNN.nn


_stdout_lock = threading.Lock()


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Within it the process writes nothing to its standard output: MNN prints what the processor can do.

    It prints by C's library, which holds text back: that is written out before and after.
    """
    flush = ctypes.CDLL(None).fflush
    with _stdout_lock:
        flush(None)
        remaining, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            yield
        finally:
            flush(None)
            os.dup2(remaining, 1)
            os.close(remaining)
            os.close(nowhere)
