"""Who reads a tensor, and moving its readers, without copying the list of them.

`onnx_ir.Value.uses()` copies; a tensor with 50,000 readers asked 50,000 times would make rewriting
quadratic. Where `onnx_ir` keeps its readers under another name, the public, slower way is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from intarsia.network.raw import FAST

Uses = tuple[tuple[ir.Node, int], ...]


def use_count(value: ir.Value) -> int:
    """The number of reads by layers."""
    return len(value._uses) if FAST else len(value.uses())


def readers(value: ir.Value) -> list[ir.Node]:
    """The layers that read a tensor, one for each read."""
    return [use[0] for use in (value._uses if FAST else value.uses())]


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads what a layer makes."""
    if FAST:
        for value in node._outputs:  # noqa: SIM110  (a generator costs more than the rest)
            if value._uses or value._is_graph_output:
                return False
        return True
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def detach(node: ir.Node) -> None:
    """Let a layer read nothing any more."""
    if not FAST or node.device_configurations:
        node.resize_inputs(0)
        return
    for index, value in enumerate(node._inputs):
        if value is not None:
            del value._uses[node, index]  # type: ignore[arg-type]
    node._inputs = ()


def move_uses(old: ir.Value, new: ir.Value) -> Uses:
    """Let every reader of one tensor read another; the reads that were moved."""
    if not FAST:
        uses = tuple(old.uses())
        for node, index in uses:
            node.replace_input_with(index, new)
        return uses
    moved = old._uses
    uses = tuple(moved)
    for use in uses:
        node, index = use
        if node.device_configurations:
            node.replace_input_with(index, new)
            continue
        inputs = node._inputs
        node._inputs = (*inputs[:index], new, *inputs[index + 1 :])
        del moved[use]
        new._uses[use] = None
    return uses


def take_out(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Remove layers that read nothing and that nothing reads."""
    if not FAST:
        graph.remove(nodes)
        return
    listed = graph._nodes
    for node in nodes:
        node._graph = None
        listed.remove(node)
