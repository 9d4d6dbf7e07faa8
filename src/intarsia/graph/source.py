"""Where a node comes from in the user's model: module path and source line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def modules(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The modules the node was traced in, outermost first, as (qualified path, class or its name)."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, kind in stack.values():
        yield _clean_path(path), kind


def module_path(node: fx.Node) -> str:
    """The qualified path of the innermost module the node was traced in; empty for the root."""
    stack = node.meta.get("nn_module_stack")
    return _clean_path(list(stack.values())[-1][0]) if stack else ""


def source_line(node: fx.Node, *, full: bool = False) -> str:
    """Where in the user's code the node comes from, as `file.py:12`; empty when unknown."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path if full else PurePath(path).name}:{line}"


def origin_of(node: fx.Node) -> dict[str, str]:
    """The node's name, its module and its line, as layer metadata."""
    origin = node.meta.get("intarsia.origin")
    if origin is None:
        origin = {"fx": node.name}
        if path := module_path(node):
            origin["module"] = path
        if line := source_line(node, full=True):
            origin["source"] = line
        node.meta["intarsia.origin"] = origin
    return dict(origin)


def _clean_path(path: str) -> str:
    # torch.export writes "L['self'].layers.0" or "layers.0", by version and by mode; torch.compile writes
    # "L['self']._modules['layers']._modules['0']" or "L['self'].layers[0]".
    path = re.sub(r"^[LG]\['[^']+'\]\.?", "", path)
    path = re.sub(r"\.?_modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return path.lstrip(".")
