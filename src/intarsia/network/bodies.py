"""Bodies: the graphs that layers such as If and Loop hold, and what those read of the network around them."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

_OWNER = "intarsia.owner"


class OuterUse(NamedTuple):
    """A layer inside a body reads a value that is made outside of it."""

    node: ir.Node
    position: int
    value: ir.Value


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs a layer holds."""
    graphs: list[ir.Graph] = []
    for attr in node.attributes.values():
        if attr.type is ir.AttributeType.GRAPH:
            graphs.append(attr.value)
        elif attr.type is ir.AttributeType.GRAPHS:
            graphs += attr.value
    return graphs


def take_bodies(node: ir.Node, *, only_free: bool = False) -> list[tuple[ir.Graph, ir.Node | None]]:
    """Note in the bodies of a layer that they are its own; gives each with the layer that owned it before.

    With `only_free`, a body that another layer owns stays that layer's.
    """
    taken = [(body, body.meta.get(_OWNER)) for body in bodies_of(node)]
    for body, before in taken:
        if before is None or not only_free:
            body.meta[_OWNER] = node
    return taken


def give_body(body: ir.Graph, owner: ir.Node | None) -> None:
    """Let a body be a layer's, or nobody's."""
    body.meta[_OWNER] = owner


def outer_uses(node: ir.Node, *, owned: bool = False) -> tuple[OuterUse, ...]:
    """What is read in the bodies of a layer and made outside of them.

    `owned` leaves out the bodies that another layer took over and still holds.
    """
    uses: list[OuterUse] = []
    for body in bodies_of(node):
        holder = body.meta.get(_OWNER) or node
        if owned and holder is not node and holder.graph is not None:
            continue
        inner = list(body.all_nodes())
        graphs = {body, *(one.graph for one in inner)}
        for one in inner:
            for index, value in enumerate(one.inputs):
                if value is not None and value.graph not in graphs:
                    uses.append(OuterUse(one, index, value))
    return tuple(uses)


def owner_in(graph: ir.Graph, inner: ir.Node) -> ir.Node | None:
    """The layer of a graph in whose body, or a body of that, a layer stands."""
    holder: ir.Node | None = inner
    while holder is not None and holder.graph is not graph:
        holder = None if holder.graph is None else holder.graph.meta.get(_OWNER)
    if holder is not None:
        return holder
    for node in graph:  # a graph made elsewhere says nothing of owners
        if any(inner in body.all_nodes() for body in bodies_of(node)):
            return node
    return None
