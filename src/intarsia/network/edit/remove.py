"""Taking layers out of a graph."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.bodies import outer_uses
from intarsia.network.edit.graph import EditableGraph
from intarsia.network.edit.journal import LayerRemoved


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads what a layer makes."""
    return not any(value.is_graph_output() or value.uses() for value in node.outputs)


def remove_node(graph: EditableGraph, node: ir.Node) -> None:
    """Take a layer out; an error if anything still reads it."""
    if node.graph is not graph.graph:
        raise NetworkError(f"layer {node.name} is not in network {graph.graph.name}")
    for value in node.outputs:
        if value.uses() or value.is_graph_output():
            who = ", ".join(str(use.node.name) for use in value.uses()) or "the network's outputs"
            raise NetworkError(f"layer {node.name} cannot be removed: {value.name} is read by {who}")
    _take_out(graph, node)


def remove_dead(graph: EditableGraph, nodes: list[ir.Node]) -> list[ir.Node]:
    """Take out these layers, the last first, where nothing reads them, and what fed them alone."""
    gone: list[ir.Node] = []
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.graph is not graph.graph or not is_dead(node):
            continue
        for value in _take_out(graph, node):
            if (maker := value.producer()) is not None:
                waiting.append(maker)
        gone.append(node)
    return gone


def _take_out(graph: EditableGraph, node: ir.Node) -> list[ir.Value]:
    """Detach a layer from what it, or its bodies, read; gives those values."""
    inputs = tuple(node.inputs)
    released = outer_uses(node, owned=True)
    detach(node)
    behind = graph.order.remove(node)
    graph.note_removed(node)
    graph.record(LayerRemoved(node, inputs, released, behind))
    return [value for value in (*inputs, *(use.value for use in released)) if value is not None]


def detach(node: ir.Node) -> None:
    """Let a layer and its bodies read nothing."""
    for use in outer_uses(node, owned=True):
        use.node.replace_input_with(use.position, None)
    node.resize_inputs(0)
