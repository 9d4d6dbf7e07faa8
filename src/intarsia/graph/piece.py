"""Pieces: each segment of a plan as a `GraphModule`, and a line of nodes cut at places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from intarsia.errors import PartitionError, near_names
from intarsia.graph.border import Border, borders
from intarsia.graph.line import Line
from intarsia.graph.nodes import made_from, modules
from intarsia.graph.plan import Plan
from intarsia.graph.segment import PYTORCH, Segment, readers_of
from intarsia.graph.sizes import constant_value


@dataclass(frozen=True, eq=False)
class Piece:
    """A segment as a module: call `module` with the values of `inputs`; it returns those of `outputs`.

    `inputs` and `outputs` are nodes of the graph of `owner`. `graph` is the graph of the piece.
    """

    segment: Segment
    owner: fx.GraphModule
    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def module(self) -> fx.GraphModule:
        """The piece as a module, built at the first access because that takes most of the time."""
        return fx.GraphModule(self.owner, self.graph)


def extract(gm: fx.GraphModule, plan: Plan, at_hand: Sequence[Iterable[fx.Node]] = ()) -> list[Piece]:
    """Cut every segment of `plan` out of `gm`, in the order they run.

    Weights are shared with `gm`, not copied. If the graph returns a size or a constant, one more piece on
    PyTorch, without nodes, returns it. So every value that the graph returns is one of its inputs, a plain
    constant, or an output of a piece. `at_hand` are tensors of each segment from which it may read a size.
    """
    edges = borders(gm.graph, plan.segments, at_hand)
    pieces = [_piece(gm, segment, border) for segment, border in zip(plan.segments, edges[:-1], strict=True)]
    if epilogue := _epilogue(gm, edges[-1]):
        pieces.append(epilogue)
    return pieces


def _piece(gm: fx.GraphModule, segment: Segment, border: Border) -> Piece:
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in border.inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)

    def local(node: fx.Node) -> Any:
        if node not in copies:
            copies[node] = constant_value(node)
        return copies[node]

    for node in border.local:
        if node in border.sizes:
            tensor, axis = border.sizes[node]
            copy = graph.call_function(torch.ops.aten.sym_size.int, (copies[tensor], axis))
            copy.meta = dict(node.meta)
        else:
            copy = graph.node_copy(node, local)
        copies[node] = copy
    graph.output(tuple(copies[node] for node in border.outputs))
    return Piece(segment, gm, graph, border.inputs, border.outputs)


def _epilogue(gm: fx.GraphModule, border: Border) -> Piece | None:
    returned = dict.fromkeys(gm.graph.output_node().all_input_nodes)
    outputs = tuple(node for node in border.local if node in returned)
    if not outputs:
        return None
    whole = Border(border.inputs, outputs, border.local, border.sizes)
    return _piece(gm, Segment(PYTORCH, ()), whole)


# Cutting a line: places by name, plans from places, and places from plans.


def plan_at(line: Line, places: Sequence[int]) -> Plan:
    """The plan whose segments are the parts between `places`."""
    line.check(places)
    bounds = [0, *places, len(line.nodes)]
    parts = [[n for n in line.nodes[a:b] if n not in line.recomputed] for a, b in pairwise(bounds)]
    home = {node: number for number, part in enumerate(parts) for node in part}
    readers = readers_of(line.graph, line.recomputed, home)
    again: list[list[fx.Node]] = [[] for _ in parts]
    for node in line.recomputed:
        first, *others = sorted(readers[node]) or [len(parts) - 1]
        parts[first].append(node)
        for number in others:
            again[number].append(node)
    segments = [
        Segment(PYTORCH, tuple(sorted(part, key=line.index.__getitem__)), False, {}, tuple(more))
        for part, more in zip(parts, again, strict=True)
    ]
    return Plan(tuple(segments), "cuts")


def pieces_at(gm: fx.GraphModule, line: Line, places: Sequence[int]) -> list[Piece]:
    """The parts between `places` as pieces. A size is read from a value that crosses at the piece's place."""
    return extract(gm, plan_at(line, places), [line.inputs, *map(line.crossing, places)])


def place_of(line: Line, cut: int | str) -> int:
    """The place of a cut: its number, the node after it, or the module whose nodes follow it."""
    if isinstance(cut, int):
        return cut
    own = [i for i, node in enumerate(line.nodes) if node not in line.recomputed]
    for i, node in enumerate(line.nodes):
        if node.name == cut:
            return min((place for place in own if place >= i), default=i)
    inside = [i for i in own if any(path == cut for path, _ in modules(line.nodes[i]))]
    if inside:
        return inside[0]
    known = {node.name for node in line.nodes} | {path for n in line.nodes for path, _ in modules(n)}
    hint = near_names(cut, known)
    raise PartitionError(f"cuts names {cut!r}, which is neither a node nor a module of the graph{hint}")


def places_of(line: Line, plan: Plan) -> list[int]:
    """The places where a plan cuts. Its graph may be another graph of the same model.

    Nodes are matched by the names from export, or by the node they were decomposed from. Of the places
    between two segments, the one where the fewest bytes cross is returned.
    """
    placed = [(node, i) for i, segment in enumerate(plan.segments) for node in segment.nodes]
    number = {source.name: i for node, i in placed for source in made_from(node)}
    number |= {node.name: i for node, i in placed}
    placed_nodes = [
        (i, number[n.name]) for i, n in enumerate(line.nodes) if n.name in number and n not in line.recomputed
    ]
    places: list[int] = []
    for border in range(len(plan) - 1):
        first = max((i for i, segment in placed_nodes if segment <= border), default=-1) + 1
        last = min((i for i, segment in placed_nodes if segment > border), default=-1)
        between = [i for i in line.allowed if first <= i <= last]
        if not between:
            what = f"segments {border} and {border + 1} of the plan ({plan.strategy or 'by hand'})"
            raise PartitionError(f"this graph may not be cut anywhere between {what}")
        places.append(min(reversed(between), key=line.crossing_bytes.__getitem__))
    line.check(places)
    return places


def relayed(
    pieces: Sequence[Piece],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    held: Collection[fx.Node] = (),
) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """The inputs and outputs of each piece if values pass only from one piece to the next.

    Values for later pieces pass through those before them. The first piece takes `inputs` and the last one
    returns `results`. Values in `held` are not passed.
    """
    place = {node: i for i, node in enumerate(inputs[0].graph.nodes)} if inputs else {}
    gives = list(results)
    pairs: list[tuple[list[fx.Node], list[fx.Node]]] = []
    for number in reversed(range(len(pieces))):
        needed = {*pieces[number].inputs, *gives} - {*pieces[number].outputs, *held}
        takes = sorted(needed, key=place.__getitem__) if number else list(inputs)
        pairs.append((takes, gives))
        gives = takes
    return pairs[::-1]
