"""What a rewrite changed, and the layers below it at which a pattern may match now and did not before."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from intarsia.network.bodies import owner_in
from intarsia.network.edit.journal import InputReplaced, LayerRemoved, TypeChanged, UsesReplaced
from intarsia.rewrite.term import TRANSPARENT
from intarsia.rewrite.transaction import Change

READERS = 64  # a value with more readers than this is not asked about as one whose readers a pattern counts


def changed_layers(graph: ir.Graph, change: Change) -> list[ir.Node]:
    """The layers that are new, read something else, or make what others read than before."""
    found: dict[ir.Node, None] = dict.fromkeys(change.made)
    recounted: dict[ir.Value, None] = {}  # values that gained or lost readers
    for node in change.made:
        recounted.update(dict.fromkeys(value for value in node.inputs if value is not None))
    for edit in change.edits:
        match edit:
            case UsesReplaced(new=new, uses=uses):
                found.update(dict.fromkeys(reader for reader, _ in uses))
                recounted[new] = None
            case InputReplaced(node=node, old=old, new=new):
                found[node] = None
                recounted.update(dict.fromkeys(value for value in (old, new) if value is not None))
            case LayerRemoved(inputs=inputs, released=released):
                recounted.update(dict.fromkeys(value for value in inputs if value is not None))
                recounted.update(dict.fromkeys(use.value for use in released))
            case TypeChanged(value=value):
                recounted[value] = None
                found.update(dict.fromkeys(value.consumers()))
    for value in recounted:
        if value.const_value is not None or len(readers := value.consumers()) > READERS:
            continue
        if (maker := value.producer()) is not None:
            found[maker] = None
        found.update(dict.fromkeys(readers))
    return [node for node in found if node.graph is not None]


def distances_below(graph: ir.Graph, seeds: Iterable[ir.Node], reach: int) -> dict[ir.Node, int]:
    """The layers less than `reach` below these, and how far; layers that may change nothing do not count."""
    found: dict[ir.Node, int] = {}
    front = [owner for node in seeds if (owner := owner_in(graph, node)) is not None]
    for distance in range(reach):
        below: list[ir.Node] = []
        while front:
            node = front.pop()
            if node in found:
                continue
            found[node] = distance
            readers = [reader for value in node.outputs for reader in value.consumers()]
            for reader in readers:
                if reader.graph is not graph:
                    continue  # in a body; patterns look at one graph
                (front if reader.op_type in TRANSPARENT else below).append(reader)
        front = below
    return found
