"""Units: nodes that stay together in one segment, and the order between units."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.nodes import (
    is_compute,
    is_control_flow,
    is_creation,
    is_free,
    is_ordered,
    is_size,
    is_view,
    producer,
    whereabouts,
)
from intarsia.graph.segment import find_recomputed
from intarsia.graph.sizes import constant_value, input_symbols, symbol_of
from intarsia.partition.schedule import Problem
from intarsia.partition.table import SupportTable


@dataclass(frozen=True, eq=False)
class Units:
    """The graph for the scheduler.

    `nodes[v]` are the compute nodes of unit `v` in graph order; `before[v]` are the units it depends on, all
    smaller. `recomputed` are views of graph inputs or weights, and fresh constants. Every reader computes
    them again: they cost nothing and would only connect segments.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    before: tuple[tuple[int, ...], ...]
    recomputed: tuple[fx.Node, ...]

    def problem(self, table: SupportTable) -> Problem:
        """The units, coloured by the engine each goes to. Control flow has a colour of its own."""
        number = {engine: place for place, engine in enumerate(table.engines)}
        colours = []
        for unit, members in enumerate(self.nodes):
            alone = len(members) == 1 and is_control_flow(members[0])
            colours.append(-1 - unit if alone else number[table.choice(members[0])])
        return Problem(colours, self.before)


def find_recomputable(
    graph: fx.Graph, table: SupportTable, grouped: Container[fx.Node] = ()
) -> dict[fx.Node, None]:
    """Views of inputs and weights, views of these, and fresh constants, if every engine takes them."""

    def is_cheap(node: fx.Node) -> bool:
        accepted = all(table.accepts(node, engine) for engine in table.engines)
        return accepted and node not in grouped and (is_view(node) or is_creation(node))

    return find_recomputed(graph, is_cheap, lambda value: value.op in ("placeholder", "get_attr"))


def find_units(graph: fx.Graph, table: SupportTable, groups: Sequence[Sequence[fx.Node]] = ()) -> Units:
    """The compute nodes as units; each of `groups` is one."""
    recomputed = find_recomputable(graph, table, {node for group in groups for node in group})
    owner: dict[fx.Node, int] = {}
    members: list[list[fx.Node]] = []
    for group in groups:
        for node in group:
            owner[node] = len(members)
        members.append(list(group))
    for node in graph.nodes:
        if is_compute(node) and node not in owner and node not in recomputed:
            owner[node] = len(members)
            members.append([node])
    needs = _dependencies(graph, recomputed)
    before: list[dict[int, None]] = [{} for _ in members]
    for node, unit in owner.items():
        for earlier in needs[node]:
            if owner[earlier] != unit:
                before[unit][owner[earlier]] = None
    position = {node: place for place, node in enumerate(graph.nodes)}
    order = _topological([position[nodes[0]] for nodes in members], before, members)
    rank = {unit: place for place, unit in enumerate(order)}
    return Units(
        tuple(tuple(sorted(members[unit], key=position.__getitem__)) for unit in order),
        tuple(tuple(sorted(rank[earlier] for earlier in before[unit])) for unit in order),
        tuple(recomputed),
    )


def _dependencies(graph: fx.Graph, recomputed: Mapping[fx.Node, None]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For every node, the compute nodes it depends on, through free and recomputed nodes."""
    symbols = input_symbols(graph)
    sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
    last_ordered: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "output":
            break
        if _recomputable(node, symbols):
            sources[node] = ()
            continue
        nodes: dict[fx.Node, None] = {}
        for value in node.all_input_nodes:
            source = producer(value)
            if is_compute(source) and source not in recomputed:
                nodes[source] = None
            else:
                nodes.update(dict.fromkeys(sources[source]))
        if is_compute(node) and is_ordered(node):
            # Random numbers are drawn, and effects happen, in the order of the model.
            if last_ordered is not None:
                nodes[last_ordered] = None
            last_ordered = node
        sources[node] = tuple(nodes)
    return sources


def _recomputable(node: fx.Node, symbols: Mapping[object, object]) -> bool:
    """Whether any segment can compute a value without waiting for another segment."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if not is_free(node):
        return False
    return constant_value(node) is not None or (is_size(node) and symbol_of(node) in symbols)


def _topological(
    position: Sequence[int], before: Sequence[Mapping[int, None]], members: Sequence[Sequence[fx.Node]]
) -> list[int]:
    """Units in dependency order, and in graph order where dependencies allow."""
    sorter = TopologicalSorter(dict(enumerate(before)))
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = next(unit for unit in error.args[1] if len(members[unit]) > 1)
        names = ", ".join(whereabouts(node) for node in members[stuck])
        raise PartitionError(
            f"an atomic pattern holds [{names}], but a node between them is outside it"
        ) from error
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            heapq.heappush(ready, (position[unit], unit))
        _, unit = heapq.heappop(ready)
        order.append(unit)
        sorter.done(unit)
    return order
