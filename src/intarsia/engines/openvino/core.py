"""The OpenVINO runtime of this process."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def core() -> Any:
    import openvino

    return openvino.Core()


def capabilities() -> list[str]:
    """The arithmetic that OpenVINO has kernels for on this processor: "FP32", "BF16", "INT8", ..."""
    return [str(name) for name in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")]


def last_line(error: Exception) -> str:
    """The line of OpenVINO's message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
