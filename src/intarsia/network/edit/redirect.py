"""Replacing values, removing layers, and undoing such edits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.attributes import give_body, outer_uses, owner_in
from intarsia.network.edit.graph import EditableGraph
from intarsia.network.edit.journal import (
    BodyTaken,
    ConstantAdded,
    Edit,
    InputAdded,
    InputReplaced,
    LayerAdded,
    LayerRemoved,
    OutputMarked,
    Reordered,
    TypeChanged,
    UsesReplaced,
)
from intarsia.network.value import TypedValue


def replace_value(graph: EditableGraph, old: ir.Value, new: ir.Value) -> bool:
    """Replace a value in all its readers and in the graph's outputs; False if nothing changes.

    An output keeps its name. `new` takes the name over, or a copy of `new` does if `new` has to keep its own.
    """
    if old is new:
        return False
    if new.graph is not graph.graph:
        raise NetworkError(f"{new.name} does not belong to the network of {old.name}")
    uses, maker = tuple(old.uses()), new.producer()
    if old.is_graph_output():
        if old.is_graph_input():
            raise NetworkError(f"{old.name} is both an input and an output: its name cannot move")
        if _is_copy(old, new) and (maker is None or new.is_graph_output()):
            for reader, index in uses:  # the output is a copy of `new` already
                replace_input(graph, reader, index, new)
            return bool(uses)
    if maker is not None:
        _move_readers_behind(graph, old, new, maker, uses)
    for reader, index in uses:
        reader.replace_input_with(index, new)
    if old.is_graph_output():
        shown, positions = _take_over_output(graph, old, new)
        graph.record(UsesReplaced(old, shown, uses, positions))
    else:
        graph.record(UsesReplaced(old, new, uses, ()))
    graph.replacements.value_replaced(old, new)
    return True


def replace_input(graph: EditableGraph, reader: ir.Node, index: int, new: ir.Value) -> None:
    """Replace one input of a layer."""
    old = reader.inputs[index]
    if new.graph is not graph.graph:
        raise NetworkError(f"{new.name} does not belong to the network of {reader.name}")
    if (maker := new.producer()) is not None:
        _move_readers_behind(graph, new if old is None else old, new, maker, ((reader, index),))
    reader.replace_input_with(index, new)
    graph.record(InputReplaced(reader, index, old, new))


def mark_output(graph: EditableGraph, value: ir.Value, name: str | None) -> None:
    """Make a value an output with this name. If it has to keep another name, a copy of it is the output."""
    if name is not None and value.name != name and (value.is_graph_input() or value.is_graph_output()):
        value = _copied(graph, value)
    before = value.name
    if name is not None and before != name:
        value.name = graph.unique_name(name)
    graph.graph.outputs.append(value)
    graph.record(OutputMarked(value, before))


def _take_over_output(graph: EditableGraph, old: ir.Value, new: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
    """Replace an output by a value, or by a copy of it; returns the new output and its positions."""
    outputs = graph.graph.outputs
    positions = tuple(i for i, value in enumerate(outputs) if value is old)
    shown = _copied(graph, new) if new.producer() is None or new.is_graph_output() else new
    for position in positions:
        outputs[position] = shown
    old.name, shown.name = shown.name, old.name
    return shown, positions


def _is_copy(value: ir.Value, of: ir.Value) -> bool:
    maker = value.producer()
    return maker is not None and maker.op_type == "Identity" and not maker.domain and maker.inputs[0] is of


def _copied(graph: EditableGraph, value: ir.Value) -> ir.Value:
    """A copy of a value: the output of a new Identity at the end of the graph."""
    outer, graph.anchor = graph.anchor, None
    view = TypedValue(value)
    node = graph.new_node("Identity", [value], None, [(view.dtype, view.shape)])
    graph.anchor = outer
    return node.outputs[0]


def _move_readers_behind(
    graph: EditableGraph,
    old: ir.Value,
    new: ir.Value,
    maker: ir.Node,
    uses: Collection[tuple[ir.Node, int]],
) -> None:
    """Move the readers after the layer that makes `new`; NetworkError if one of them leads to that layer."""
    order = graph.order
    former = old.producer()
    if former is not None and former.graph is graph.graph and order.of(maker) < order.of(former):
        return  # all readers of `old` come after the layer that makes it
    readers = [_owner(graph.graph, node) for node, _ in uses]
    early = [reader for reader in readers if order.of(reader) <= order.of(maker)]
    if not early:
        return
    # Everything that is made from an early reader, and stands before `maker`, moves after it.
    region, stack = dict.fromkeys(early), list(early)
    while stack:
        node = stack.pop()
        if node is maker:
            raise NetworkError(f"replacing {old.name} with {new.name} would close a cycle")
        for value in node.outputs:
            for user, _ in value.uses():
                reader = _owner(graph.graph, user)
                if reader not in region and order.of(reader) <= order.of(maker):
                    region[reader] = None
                    stack.append(reader)
    nodes = list(graph.graph)
    graph.record(Reordered(nodes))
    outside = [node for node in nodes if node not in region]
    place = outside.index(maker) + 1
    order.reorder([*outside[:place], *(node for node in nodes if node in region), *outside[place:]])


def _owner(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """The layer itself, or the layer of this graph in whose body it is."""
    owner = owner_in(graph, node)
    if owner is None:
        raise NetworkError(f"layer {node.name} belongs to another network")
    return owner


def is_dead(node: ir.Node) -> bool:
    """Whether nothing reads the outputs of a layer."""
    return not any(value.is_graph_output() or value.uses() for value in node.outputs)


def remove_node(graph: EditableGraph, node: ir.Node) -> None:
    """Remove a layer; NetworkError if something still reads it."""
    if node.graph is not graph.graph:
        raise NetworkError(f"layer {node.name} is not in network {graph.graph.name}")
    for value in node.outputs:
        if value.uses() or value.is_graph_output():
            who = ", ".join(str(use.node.name) for use in value.uses()) or "the network's outputs"
            raise NetworkError(f"layer {node.name} cannot be removed: {value.name} is read by {who}")
    _take_out(graph, node)


def remove_dead(graph: EditableGraph, nodes: list[ir.Node]) -> list[ir.Node]:
    """Remove those of these layers that nothing reads, the last first, and the layers that only they read."""
    removed: list[ir.Node] = []
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.graph is not graph.graph or not is_dead(node):
            continue
        for value in _take_out(graph, node):
            if (maker := value.producer()) is not None:
                waiting.append(maker)
        removed.append(node)
    return removed


def _take_out(graph: EditableGraph, node: ir.Node) -> list[ir.Value]:
    """Remove a layer; returns the values that it and its bodies read."""
    inputs = tuple(node.inputs)
    released = outer_uses(node, owned=True)
    detach(node)
    behind = graph.order.remove(node)
    graph.note_removed(node)
    graph.record(LayerRemoved(node, inputs, released, behind))
    return [value for value in (*inputs, *(use.value for use in released)) if value is not None]


def detach(node: ir.Node) -> None:
    """Clear the inputs of a layer and the outer values that its bodies read."""
    for use in outer_uses(node, owned=True):
        use.node.replace_input_with(use.position, None)
    node.resize_inputs(0)


def undo(graph: EditableGraph, edits: Sequence[Edit]) -> None:
    """Undo these edits, the last first. The graph is then as before, with its names and order."""
    for edit in reversed(edits):
        _undo_edit(graph, edit)


def _undo_edit(graph: EditableGraph, edit: Edit) -> None:
    match edit:
        case LayerAdded(node=node):
            detach(node)
            graph.order.remove(node)
            graph.note_removed(node)
        case LayerRemoved():
            _restore(graph, edit)
        case UsesReplaced():
            _redirect_back(graph, edit)
        case InputReplaced(node=node, position=position, old=old):
            node.replace_input_with(position, old)
        case BodyTaken(body=body, before=before):
            give_body(body, before)
        case ConstantAdded(value=value, key=key):
            graph.graph.initializers.pop(str(value.name))
            if key is not None:
                graph.constants.pop(key, None)
        case InputAdded(value=value):
            graph.graph.inputs.remove(value)
        case OutputMarked(value=value, name=name):
            graph.graph.outputs.pop()
            value.name = name
        case Reordered(nodes=nodes):
            graph.order.reorder(nodes)
        case TypeChanged(value=value):
            value.type, value.shape = edit.type, edit.shape


def _restore(graph: EditableGraph, edit: LayerRemoved) -> None:
    node = edit.node
    node.resize_inputs(len(edit.inputs))
    for index, value in enumerate(edit.inputs):
        node.replace_input_with(index, value)
    for use in edit.released:
        use.node.replace_input_with(use.position, use.value)
    graph.order.insert(node, edit.behind)
    graph.note_added(node)


def _redirect_back(graph: EditableGraph, edit: UsesReplaced) -> None:
    if edit.outputs:
        edit.old.name, edit.new.name = edit.new.name, edit.old.name
    for position in edit.outputs:
        graph.graph.outputs[position] = edit.old
    for node, index in edit.uses:
        node.replace_input_with(index, edit.old)
    graph.replacements.value_restored(edit.old)
