"""The processor that engines pick their kernels by."""

from __future__ import annotations

import functools
import platform


@functools.cache
def is_arm() -> bool:
    """Whether it is one of ARM, of 64 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")
