"""Bodies: the graphs that layers such as If and Loop hold, and the outer values that they read."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

_OWNER = "intarsia.owner"


class OuterUse(NamedTuple):
    """A layer inside a body reads a value from outside it."""

    node: ir.Node
    position: int
    value: ir.Value


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a layer."""
    graphs: list[ir.Graph] = []
    for attr in node.attributes.values():
        if attr.type is ir.AttributeType.GRAPH:
            graphs.append(attr.value)
        elif attr.type is ir.AttributeType.GRAPHS:
            graphs += attr.value
    return graphs


def take_bodies(node: ir.Node, *, only_free: bool = False) -> list[tuple[ir.Graph, ir.Node | None]]:
    """Make a layer the owner of its bodies; returns each body with its former owner.

    With `only_free`, a body that has an owner keeps it.
    """
    former = [(body, body.meta.get(_OWNER)) for body in bodies_of(node)]
    for body, owner in former:
        if owner is None or not only_free:
            body.meta[_OWNER] = node
    return former


def give_body(body: ir.Graph, owner: ir.Node | None) -> None:
    """Set the owner of a body; None for no owner."""
    body.meta[_OWNER] = owner


def outer_uses(node: ir.Node, *, owned: bool = False) -> tuple[OuterUse, ...]:
    """The values from outside that the bodies of a layer read.

    With `owned`, bodies whose owner is another layer of a graph are left out.
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
    """The layer of a graph in whose body, at any depth, a layer is."""
    holder: ir.Node | None = inner
    while holder is not None and holder.graph is not graph:
        holder = None if holder.graph is None else holder.graph.meta.get(_OWNER)
    if holder is not None:
        return holder
    for node in graph:  # bodies of a graph that was made elsewhere have no owner
        if any(inner in body.all_nodes() for body in bodies_of(node)):
            return node
    return None
