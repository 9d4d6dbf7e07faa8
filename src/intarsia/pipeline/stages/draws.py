"""The nodes of a graph that draw random numbers: numbered over the whole model, drawn by key in stages."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from intarsia.graph.nodes import bodies_of
from intarsia.pipeline.gpipe.keyed_random import draws_of, keyed_draw


@dataclass(frozen=True)
class Draws:
    """The draws of a node: the number of its first among all of the model, and how many it makes."""

    number: int
    count: int


def number_draws(graph: fx.Graph) -> dict[str, Draws]:
    """Every node that draws, by its name; in the body of an operator (`cond`) behind that of the operator."""
    found: dict[str, Draws] = {}
    total = 0

    def walk(inner: fx.Graph, prefix: str) -> None:
        nonlocal total
        for node in inner.nodes:
            if node.op != "call_function":
                continue
            for i, body in enumerate(bodies_of(node)):
                walk(body.graph, f"{prefix}{node.name}/{i}/")
            count = draws_of(node.target, node.args, node.kwargs)
            if count:
                found[prefix + node.name] = Draws(total, count)
                total += count

    walk(graph, "")
    return found


def keyed_program(program: nn.Module, draws: Mapping[str, Draws], prefix: str = "") -> nn.Module:
    """A graph whose drawing nodes draw by key; the graph itself where there are none."""
    drawing = {name.removeprefix(prefix).split("/")[0] for name in draws if name.startswith(prefix)}
    if not isinstance(program, fx.GraphModule) or drawing.isdisjoint(
        node.name for node in program.graph.nodes if node.op == "call_function"
    ):
        return program
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    bodies: dict[str, nn.Module] = {}
    for node in program.graph.nodes:
        for i, body in enumerate(bodies_of(node) if node.op == "call_function" else ()):
            (target,) = (
                str(n.target)
                for n in node.all_input_nodes
                if n.op == "get_attr" and operator.attrgetter(str(n.target))(program) is body
            )
            bodies[target] = keyed_program(body, draws, f"{prefix}{node.name}/{i}/")
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        own = draws.get(prefix + node.name)
        if own is not None and node.op == "call_function":  # in a later stage it is an input of that name
            copy.args = (node.target, own.number, own.count, *copy.args)
            copy.target = keyed_draw
    held: dict[str, Any] = {
        str(n.target): bodies.get(str(n.target)) or operator.attrgetter(str(n.target))(program)
        for n in graph.nodes
        if n.op in ("get_attr", "call_module")
    }
    return fx.GraphModule(held, graph)
