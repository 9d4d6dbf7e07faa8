"""Where a node comes from in the user's model: module path and source line."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def module_path(node: fx.Node) -> str:
    """The qualified name of the submodule whose forward made the node, or ''."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = str(entry[0] if isinstance(entry, tuple) else entry)
    # Export spells the root as `L['self']`, or writes `L['self'].encoder` in some versions.
    path = path.removeprefix("L['self']").lstrip(".")
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", path).lstrip(".")


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame of the user's forward, or ''."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def origin_of(node: fx.Node) -> dict[str, str]:
    """Both, and the node's name, as layer metadata."""
    origin = node.meta.get("intarsia.origin")
    if origin is None:
        origin = {"fx": node.name}
        if path := module_path(node):
            origin["module"] = path
        if line := source_line(node):
            origin["source"] = line
        node.meta["intarsia.origin"] = origin
    return dict(origin)
