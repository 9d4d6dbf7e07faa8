"""Freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
import sys


def release_freed() -> None:
    """Return freed memory to the system, if the C library has a function for it (glibc).

    glibc returns a block at once only if it is larger than every block freed before. After compiling a
    decoder of 70 MB in 4 bits, it kept 80 MB.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
