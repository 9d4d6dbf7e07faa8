"""A graph as a line of nodes: where it may be cut, which values cross there, and how many bytes they have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.nodes import (
    changed_values,
    compute_nodes,
    has_no_effect,
    is_compute,
    is_creation,
    is_size,
    is_view,
    memory_of,
    op_name,
    producer,
    written_values,
)
from intarsia.graph.segment import find_recomputed
from intarsia.graph.sizes import total_bytes


@dataclass(frozen=True)
class Waist:
    """A place where a graph may be cut: before node `place` of its line, where these values cross."""

    place: int
    node: str
    crossing: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        return f"before {self.node}: {', '.join(self.crossing)} ({self.bytes} bytes)"


@dataclass(frozen=True, eq=False)
class Line:
    """The compute nodes of a graph in order. A cut at `i` is before node `i`.

    `held` are inputs of the graph that every piece has, so that they never cross: weights and buffers, or for
    placement all inputs. A recomputed value may depend on those of them that are `readable`. `cheap` says
    which nodes may be recomputed.
    """

    graph: fx.Graph
    held: Collection[fx.Node]
    readable: Collection[fx.Node]
    cheap: Callable[[fx.Node], bool]

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The compute nodes in order."""
        return tuple(compute_nodes(self.graph))

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The inputs of the graph that are not held. They are before the first node."""
        held = frozenset(self.held)
        return tuple(n for n in self.graph.nodes if n.op == "placeholder" and n not in held)

    @cached_property
    def index(self) -> Mapping[fx.Node, int]:
        """The place of each node."""
        return dict.fromkeys(self.inputs, -1) | {n: i for i, n in enumerate(self.nodes)}

    @cached_property
    def recomputed(self) -> Mapping[fx.Node, None]:
        """The nodes that each piece computes for itself."""
        readable = frozenset(self.readable)
        return find_recomputed(
            self.graph,
            lambda node: node not in self.written and self.cheap(node),
            lambda value: value.op == "get_attr" or (value in readable and value not in self.written),
        )

    @cached_property
    def written(self) -> frozenset[fx.Node]:
        """Every value whose memory some node changes in place."""
        return written_values(n for n in self.graph.nodes if n.op != "output")

    @cached_property
    def closed(self) -> Mapping[int, str]:
        """Places where no cut may be, each with the reason: a value is changed in place across it."""
        reasons: dict[int, str] = {}
        for node in self.nodes:
            for value in changed_values(node):
                for root in memory_of(value):
                    first, last = self._span_of_change(root, node)
                    why = f"{root.name} is changed in place by {op_name(node)} ({node.name})"
                    reasons |= {i: why for i in range(first + 1, last + 1) if i not in reasons}
        return reasons

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The places where a cut may be. A recomputed node begins no piece, since several pieces have it."""
        own = [i for i, node in enumerate(self.nodes) if node not in self.recomputed]
        return tuple(i for i in own[1:] if i not in self.closed)

    def check(self, places: Sequence[int]) -> None:
        """Raise `PartitionError` for a place where no cut may be, or for places that do not increase."""
        for place in places:
            if not 0 < place < len(self.nodes):
                raise PartitionError(f"cut {place} is outside the graph, which has {len(self.nodes)} nodes")
            if place not in self.allowed:
                why = self.closed.get(place, "every piece that needs the values before it computes them")
                name = self.nodes[place].name
                raise PartitionError(f"the graph may not be cut before node {place} ({name}): {why}")
        if list(places) != sorted(set(places)):
            raise PartitionError(f"cuts={list(places)} must increase")

    def crossing(self, place: int) -> tuple[fx.Node, ...]:
        """The values that are made before `place` and used at or after it, in the order they are made."""
        return tuple(value for value, (first, last) in self._spans.items() if first < place <= last)

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes that cross at every place 0 .. n, at the sizes of the example."""
        return self._alive(lambda value: total_bytes([value]))

    def waist(self, place: int) -> Waist:
        """What crosses at `place`."""
        crossing = self.crossing(place)
        names = tuple(value.name for value in crossing)
        return Waist(place, self.nodes[place].name, names, total_bytes(crossing))

    def waists(self) -> list[Waist]:
        """The allowed places where the fewest values are alive: fewer than at the places around them.

        ```
            values alive   2 ┤    ┌──┐     ┌──┐
                           1 ┤────┘  └─────┘  └────   waists: all places of the lower level
        ```
        """
        alive = self._alive(lambda value: 1)
        levels: list[list[int]] = []  # neighbouring allowed places with equally many values alive
        for place in self.allowed:
            if levels and alive[levels[-1][0]] == alive[place]:
                levels[-1].append(place)
            else:
                levels.append([place])
        heights = [alive[level[0]] for level in levels]
        around = [float("inf"), *heights, float("inf")]
        low = [h < min(around[i], around[i + 2]) for i, h in enumerate(heights)]
        return [self.waist(p) for level, is_low in zip(levels, low, strict=True) if is_low for p in level]

    def sources(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """The values that `value` needs: itself, or the values that it is recomputed from."""
        sources = self._sources.get(value)
        if sources is None:
            sources = self._sources[value] = self._find_sources(value)
        return sources

    def _find_sources(self, value: fx.Node) -> tuple[fx.Node, ...]:
        if value.op in ("placeholder", "get_attr"):
            return (value,) if value in self.index else ()
        made_by = producer(value)
        if is_size(value):
            return ()  # a size is read from any tensor of the piece that has it
        if is_compute(made_by) and made_by not in self.recomputed:
            return (value,)
        sources: dict[fx.Node, None] = {}
        for source in made_by.all_input_nodes:
            sources.update(dict.fromkeys(self.sources(source)))
        return tuple(sources)

    @cached_property
    def _sources(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        return {}

    @cached_property
    def _spans(self) -> Mapping[fx.Node, tuple[int, int]]:
        """Where each value that may cross is made, and where it is last used. Results are used at the end."""
        last: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            place = len(self.nodes) if node.op == "output" else self.index.get(node, -1)
            if (node.op == "output" or is_compute(node)) and node not in self.recomputed:
                for value in node.all_input_nodes:
                    last.update(dict.fromkeys(self.sources(value), place))
        places = {value: self.index[producer(value)] for value in last}
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        return {v: (places[v], last[v]) for v in sorted(last, key=order.__getitem__)}

    def _alive(self, weight: Callable[[fx.Node], int]) -> tuple[int, ...]:
        change = [0] * (len(self.nodes) + 2)
        for value, (first, last) in self._spans.items():
            change[first + 1] += weight(value)
            change[last + 1] -= weight(value)
        totals, running = [], 0
        for step in change[:-1]:
            running += step
            totals.append(running)
        return tuple(totals)

    def _span_of_change(self, root: fx.Node, change: fx.Node) -> tuple[int, int]:
        """The places from where a value is made to its change; for a held one, from first to last reader."""
        if root in self.index:
            return self.index[root], self.index[change]
        users = [self.index[user] for user in root.users if user in self.index]
        return min(users, default=self.index[change]), max([*users, self.index[change]])


def training_line(graph: fx.Graph, states: Mapping[fx.Node, bool]) -> Line:
    """The line of a training graph with these weights and buffers; True marks those that are trained.

    Values that depend on no input and on no trained state are recomputed. A trained one is not, since its
    gradient must be summed in one place.
    """
    fixed = [node for node, learns in states.items() if not learns]
    return Line(graph, tuple(states), fixed, has_no_effect)


def placement_line(graph: fx.Graph) -> Line:
    """The line of a lowered graph, in which any piece may have any input and weight."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return Line(graph, inputs, inputs, lambda node: is_view(node) or is_creation(node))
