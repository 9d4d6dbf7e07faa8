"""Who reads a tensor, and moving its readers, without copying the list of them.

`onnx_ir.Value.uses()` copies; a tensor with 50,000 readers asked 50,000 times would make rewriting
quadratic. Where `onnx_ir` keeps its readers under another name, the public, slower way is taken.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intarsia.network.edit.raw import FAST

Uses = tuple[tuple[ir.Node, int], ...]


def use_count(value: ir.Value) -> int:
    """The number of reads by layers."""
    return len(value._uses)


def readers(value: ir.Value) -> list[ir.Node]:
    """The layers that read a tensor, one for each read."""
    return [use[0] for use in value._uses]


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads what a layer makes."""
    for value in node._outputs:  # noqa: SIM110  (a generator costs more than the rest)
        if value._uses or value._is_graph_output:
            return False
    return True


def move_uses(old: ir.Value, new: ir.Value, uses: Uses) -> None:
    """Let the readers of one tensor, which are these, read another."""
    if not FAST:
        for reader, index in uses:
            reader.replace_input_with(index, new)
        return
    source: Any = old
    target: Any = new
    fresh = not target._uses
    if fresh:  # the readers change hands as they are
        source._uses, target._uses = target._uses, source._uses
    for use in uses:
        node: Any = use[0]
        if node.device_configurations:  # of which onnx_ir knows what else changes
            if fresh:
                source._uses[use] = target._uses.pop(use)
            node.replace_input_with(use[1], new)
            continue
        inputs = node._inputs
        if len(inputs) == 2:  # as most have
            node._inputs = (inputs[0], new) if use[1] else (new, inputs[1])
        else:
            index = use[1]
            node._inputs = (*inputs[:index], new, *inputs[index + 1 :])
        if not fresh:
            target._uses[use] = source._uses.pop(use)
