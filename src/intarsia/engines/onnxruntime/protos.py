"""What a graph of ONNX's own format holds: bodies of its nodes, and the names that are read."""

from __future__ import annotations

from typing import Any


def bodies_in(node: Any) -> list[Any]:
    """The graphs that a node holds."""
    return [
        body
        for attribute in node.attribute
        for body in ([attribute.g] if attribute.HasField("g") else attribute.graphs)
    ]


def names_read(graph: Any) -> set[str]:
    """Names that are read in a graph, in the bodies of its nodes too."""
    found = {value.name for value in graph.output}
    for node in graph.node:
        found.update(node.input)
        found.update(*map(names_read, bodies_in(node)))
    return found
