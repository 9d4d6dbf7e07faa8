"""ONNX Runtime's quantization tools without what they tell and change of logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_tool() -> Iterator[None]:
    """Within it tools log errors alone; the root logger is then as it was, whatever an import did to it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    root.setLevel(logging.ERROR)
    tools = logging.getLogger("onnxruntime.quantization")
    before = tools.level
    tools.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tools.setLevel(before)
        root.setLevel(level)
        root.handlers[:] = handlers
