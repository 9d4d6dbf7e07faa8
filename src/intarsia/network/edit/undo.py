"""Taking edits back."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.network.bodies import give_body
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
    RecordChanged,
    Reordered,
    TypeChanged,
    UsesReplaced,
)
from intarsia.network.edit.redirect import detach


def undo(graph: EditableGraph, edits: Sequence[Edit]) -> None:
    """Take back these edits, the last first; the graph is then as it was, names and places included."""
    for edit in reversed(edits):
        _take_back(graph, edit)


def _take_back(graph: EditableGraph, edit: Edit) -> None:
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
            graph.replacements.input_restored(node)
        case BodyTaken(body=body, before=before):
            give_body(body, before)
        case RecordChanged(restore=restore):
            restore()
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
