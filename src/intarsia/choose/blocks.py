"""Blocks: parts of a graph between waists, of similar work, each of which is a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from intarsia.build.builder import node_kind
from intarsia.build.trial import case_of
from intarsia.choose.findings import BlockCost
from intarsia.choose.memory import contents
from intarsia.errors import PartitionError
from intarsia.graph.line import Line, placement_line
from intarsia.graph.nodes import compute_nodes, module_path, op_name
from intarsia.graph.piece import Piece, extract, plan_at
from intarsia.graph.plan import Plan
from intarsia.partition.blocks import work
from intarsia.partition.options import Atomic
from intarsia.partition.table import find_groups

_OFTEN = 4
_FIRST = (
    "conv",
    "linear",
    "addmm",
    "mm",
    "bmm",
    "matmul",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "embedding",
)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The parts of `module` between `places` of its line, in order."""

    module: fx.GraphModule
    line: Line
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places) + 1

    @cached_property
    def plan(self) -> Plan:
        """The blocks as segments; `PartitionError` if the graph cannot be cut at these places."""
        return plan_at(self.line, self.places).verify(self.module)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Every block as a graph of its own."""
        return extract(self.module, self.plan)[: len(self)]

    @cached_property
    def digests(self) -> list[str]:
        """The digest of every block; blocks with equal digests take the same time."""
        return [contents(piece.owner, piece.graph) for piece in self.pieces]

    @property
    def share(self) -> float:
        """The share of the graph's work in blocks that differ from each other."""
        weight = [sum(map(work, segment.nodes)) for segment in self.plan.segments]
        distinct = dict(zip(self.digests, weight, strict=True))
        return sum(distinct.values()) / max(sum(weight), 1e-9)

    def homes(self, way: Sequence[str]) -> dict[fx.Node, str]:
        """The engine of every node if block `i` runs on `way[i]`, without recomputed nodes."""
        recomputed = self.line.recomputed
        return {
            node: engine
            for segment, engine in zip(self.plan.segments, way, strict=True)
            for node in segment.nodes
            if node not in recomputed
        }

    def values(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """The inputs of every block when the graph runs on `inputs`."""
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        return [case_of(piece, values).inputs for piece in self.pieces]

    def untimed(self) -> list[BlockCost]:
        """The blocks for findings, without costs."""
        bounds = [0, *self.places]
        return [
            BlockCost(bounds[number], len(segment.nodes), self.begins_at(number), digest)
            for number, (segment, digest) in enumerate(zip(self.plan.segments, self.digests, strict=True))
        ]

    def begins_at(self, number: int) -> str:
        """The module path or name of the node at which a block begins."""
        first = next(n for n in self.plan.segments[number].nodes if n not in self.line.recomputed)
        return module_path(first) or first.name


def find_blocks(module: fx.GraphModule, atomic: Sequence[Atomic], most: int) -> Blocks | None:
    """At most `most` blocks of similar work, cut where the fewest values are alive; None for one block.

    Groups in `atomic` are not divided.
    """
    line = placement_line(module.graph)
    waists = _open(line, find_groups(module, atomic))
    weight = [work(node) for node in line.nodes]
    least = sum(weight) / most
    places: list[int] = []
    since, left = 0.0, sum(weight)
    for place, own in enumerate(weight):
        # A block ends at the first waist after most of its share, if another layer begins there. Otherwise it
        # may be longer, so that an activation or a norm stays with the product before it.
        enough = 0.8 if _begins_layer(line.nodes[place]) else 1.6
        if place in waists and since >= enough * least and left >= 0.5 * least:
            places.append(place)
            since = 0.0
        since, left = since + own, left - own
    blocks = Blocks(module, line, tuple(places))
    try:
        return blocks if places and blocks.plan else None
    except PartitionError:  # a value that cannot cross a border crosses a waist
        return None


def _begins_layer(node: fx.Node) -> bool:
    name = op_name(node).removeprefix("aten.").split(".")[0]
    return name.startswith(_FIRST) or "attention" in name


def is_repetitive(module: fx.GraphModule) -> bool:
    """Whether two thirds of the work are in nodes that occur at least four times, as in a transformer."""
    by_kind: dict[str, list[float]] = {}
    for node in compute_nodes(module.graph):
        by_kind.setdefault(node_kind(node), []).append(work(node))
    repeated = sum(sum(weights) for weights in by_kind.values() if len(weights) >= _OFTEN)
    return 3 * repeated > 2 * sum(map(sum, by_kind.values()))


def blocks_at(module: fx.GraphModule, places: Sequence[int]) -> Blocks:
    """The blocks between these places."""
    return Blocks(module, placement_line(module.graph), tuple(places))


def _open(line: Line, groups: Sequence[Sequence[fx.Node]]) -> Mapping[int, None]:
    """The waists that divide no group."""
    spans = [[line.index[node] for node in group] for group in groups]
    closed = {place for span in spans for place in range(min(span) + 1, max(span) + 1)}
    return {waist.place: None for waist in line.waists() if waist.place not in closed}
