"""Taking layers out of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.network.bodies import outer_reads
from intarsia.network.edit import make
from intarsia.network.edit.journal import Removed

if TYPE_CHECKING:
    from intarsia.network.network import Network


def remove_dead(
    net: Network, nodes: list[ir.Node], lone: list[ir.Value], *, feeders: bool = True
) -> list[str]:
    """Take out these layers, the last first, where nothing reads them, and what fed them alone.

    Gives the names of those that went; `lone` is given tensors they read that may have one reader left.
    """
    gone: list[str] = []
    graph, journal = net.graph, net.journal
    labels, by_name, short = net.order.labels, net.by_name, make.SHORT
    infos = net.memo.infos
    idle = nodes if feeders else []
    listed: Any = graph._nodes if short else None
    while nodes:
        node: Any = nodes.pop()
        if node._graph is not graph:
            continue
        for value in node._outputs:
            if value._uses or value._is_graph_output:
                break
        else:
            label = labels.pop(node, None)
            if label is None:
                label = net.order.of(node)
                del labels[node]
            name, inputs = node._name, node._inputs
            info = infos.pop(name, None)
            if by_name is not None:
                by_name.pop(name, None)
            released = outer_reads(node, owned=True) if net.has_bodies else ()
            if short and not released and not node.device_configurations:
                index = 0
                for value in inputs:
                    if value is not None:
                        uses = value._uses
                        del uses[node, index]
                        if len(uses) < 2 and (maker := value._producer) is not None:
                            lone.append(value) if uses else idle.append(maker)
                    index += 1  # noqa: SIM113  (enumerate costs as much as the rest)
                node._inputs = ()
                node._graph = None
                box = listed._value_ids_to_boxes.pop(id(node))
                before = box.prev
                before.next = after = box.next
                after.prev = before
                box.value = None
                listed._length -= 1
                behind = after.value
            else:
                behind = make.next_of(graph, node)
                for inner, index, _ in released:
                    inner.replace_input_with(index, None)
                node.resize_inputs(0)
                graph.remove(node)
                for value in (*inputs, *(read for *_, read in released)):
                    if value is not None and value._producer is not None and len(value._uses) < 2:
                        lone.append(value) if value._uses else idle.append(value._producer)
            gone.append(name)
            if journal is not None:
                journal.append((Removed, node, inputs, label, info, released, behind))
    return gone
