"""Redirecting reads from one tensor to another, with cycles refused and the order of layers kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.bodies import owner_in
from intarsia.network.edit.journal import Moved, Redirected
from intarsia.network.edit.raw import graph_of, producer_of
from intarsia.network.edit.uses import move_uses
from intarsia.network.tensor import Tensor

if TYPE_CHECKING:
    from intarsia.network.network import Network


def replace_value(net: Network, before: ir.Value, after: ir.Value) -> bool:
    """Let all that read one tensor, network outputs included, read another; false if they do already."""
    if before is after:
        return False
    made, graph = after._producer, net.graph
    if (after.graph if made is None else made._graph) is not graph:
        raise NetworkError(f"{after.name} does not belong to the network of {before.name}")
    uses = tuple(before._uses)
    if before._is_graph_output:
        if before.is_graph_input():
            raise NetworkError(f"{before.name} is both an input and an output: its name cannot move")
        if _is_copy(before, after) and (made is None or after._is_graph_output):
            for reader, index in uses:  # the output is already what it would become
                replace_read(net, reader, index, after)
            return bool(uses)
    if made is not None:
        labels = net.order.labels
        # What is made before `before` is made stands before all that reads it.
        early, late = labels.get(made), labels.get(before._producer)
        if early is None or late is None or early >= late:
            _order_uses(net, before, after, made, uses)
    move_uses(before, after, uses)
    if before._is_graph_output:
        shown, positions = _take_over(net, before, after, made)
        moved = (Moved, before, shown, uses, positions, True)
    else:
        moved = (Moved, before, after, uses, (), False)
    if net.journal is not None:
        net.journal.append(moved)
    net.memo.uses_moved(before, after)
    return True


def _take_over(
    net: Network, before: ir.Value, after: ir.Value, made: ir.Node | None
) -> tuple[ir.Value, tuple[int, ...]]:
    """Let a tensor, or a copy of it, stand among the network's outputs under the name that stood there."""
    outputs = net.graph.outputs
    positions = tuple(i for i, value in enumerate(outputs) if value is before)
    shown = copied(net, after) if made is None or after._is_graph_output else after
    for position in positions:
        outputs[position] = shown
    before.name, shown.name = shown.name, before.name
    return shown, positions


def replace_read(net: Network, reader: ir.Node, index: int, new: ir.Value) -> None:
    """Let one layer read another tensor at one position."""
    old = reader.inputs[index]
    if new.graph is not net.graph:
        raise NetworkError(f"{new.name} does not belong to the network of {reader.name}")
    if (maker := producer_of(new)) is not None:
        _order_uses(net, new if old is None else old, new, maker, ((reader, index),))
    reader.replace_input_with(index, new)
    if net.journal is not None:
        net.journal.append((Redirected, reader, index, old, new))
    net.memo.read_moved(net, reader, old, new)


def _is_copy(value: ir.Value, of: ir.Value) -> bool:
    made = value.producer()
    return made is not None and made.op_type == "Identity" and not made.domain and made.inputs[0] is of


def copied(net: Network, value: ir.Value) -> ir.Value:
    """What an Identity at the end of the network makes of a tensor."""
    outer, net.anchor = net.anchor, None
    made = net.add_layer(
        "Identity", [Tensor.of(value)], outputs=[(Tensor.of(value).dtype, Tensor.of(value).shape)]
    )
    net.anchor = outer
    return made.node.outputs[0]


def _order_uses(
    net: Network, old: ir.Value, new: ir.Value, maker: ir.Node, uses: Collection[tuple[ir.Node, int]]
) -> None:
    """Let the readers stand behind the maker of `new`, or refuse if it is made from one of them."""
    graph, order = net.graph, net.order
    early = []
    order.of(maker)  # has a label from now on; asked for again behind each reader, which may label all anew
    for node, _ in uses:
        reader = node if graph_of(node) is graph else _owner(net, node)
        if order.of(reader) <= order.of(maker):
            early.append(reader)
    if not early:
        return
    # Everything made from an early reader and standing before the maker moves behind it.
    region = dict.fromkeys(early)
    stack = list(early)
    while stack:
        node = stack.pop()
        if node is maker:
            raise NetworkError(f"replacing {old.name} with {new.name} would close a cycle")
        for value in node.outputs:
            for user, _ in value.uses():
                reader = user if user.graph is net.graph else _owner(net, user)
                if reader not in region and order.of(reader) <= order.of(maker):
                    region[reader] = None
                    stack.append(reader)
    moving = sorted(region, key=order.of)
    order.keep()
    net.graph.remove(moving)
    net.graph.insert_after(maker, moving)
    order.relabel()


def _owner(net: Network, inner: ir.Node) -> ir.Node:
    """The layer of this network in whose body `inner` stands."""
    found = owner_in(net.graph, inner)
    if found is None:
        raise NetworkError(f"layer {inner.name} belongs to another network")
    return found
