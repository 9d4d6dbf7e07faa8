"""The OpenVINO runtime of this process."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def core() -> Any:
    import openvino

    return openvino.Core()


def last_line(error: Exception) -> str:
    """The line of OpenVINO's message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
