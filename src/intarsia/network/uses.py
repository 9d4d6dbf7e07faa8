"""How often a tensor is read, without copying the list of its readers."""

from __future__ import annotations

import onnx_ir as ir


def use_count(value: ir.Value) -> int:
    """The number of reads by layers.

    `Value.uses()` copies; a tensor with 50,000 readers asked 50,000 times would make rewriting quadratic.
    """
    uses = getattr(value, "_uses", None)
    return len(value.uses() if uses is None else uses)


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads what a layer makes."""
    return not any(use_count(value) or value.is_graph_output() for value in node.outputs)
