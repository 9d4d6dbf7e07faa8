"""Who reads a tensor: how often, and letting go of a reader, without copying the list of them.

`onnx_ir.Value.uses()` copies; a tensor with 50,000 readers asked 50,000 times would make rewriting
quadratic. Where `onnx_ir` keeps its readers under another name, the public, slower way is taken.
"""

from __future__ import annotations

import onnx_ir as ir

FAST = all(hasattr(ir.Value, name) for name in ("_uses", "_is_graph_output")) and hasattr(ir.Node, "_inputs")


def use_count(value: ir.Value) -> int:
    """The number of reads by layers."""
    return len(value._uses) if FAST else len(value.uses())


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads what a layer makes."""
    for value in node.outputs:
        if value.is_graph_output() or (value._uses if FAST else value.uses()):
            return False
    return True


def detach(node: ir.Node) -> None:
    """Let a layer read nothing any more."""
    if not FAST or node.device_configurations:
        node.resize_inputs(0)
        return
    for index, value in enumerate(node.inputs):
        if value is not None:
            del value._uses[node, index]  # type: ignore[arg-type]
    node._inputs = ()
