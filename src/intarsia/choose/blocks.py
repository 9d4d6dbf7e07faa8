"""Blocks: a graph cut at its waists into a few stretches of like weight, each a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from intarsia.build.trial import run_in_pytorch
from intarsia.choose.findings import BlockCost
from intarsia.choose.memory import contents
from intarsia.errors import PartitionError
from intarsia.graph.line import Line, placement_line
from intarsia.graph.nodes import module_path, op_name
from intarsia.graph.piece import Piece, extract, plan_at
from intarsia.graph.plan import Plan
from intarsia.partition.blocks import work
from intarsia.partition.constrain import find_groups
from intarsia.partition.options import Atomic

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
    """The stretches of `module` between `places` of its line, first to last."""

    module: fx.GraphModule
    line: Line
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places) + 1

    @cached_property
    def plan(self) -> Plan:
        """The blocks as segments; `PartitionError` where the graph cannot be cut there after all."""
        return plan_at(self.line, self.places).verify(self.module)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Every block as a graph of its own."""
        return extract(self.module, self.plan)[: len(self)]

    @cached_property
    def digests(self) -> list[str]:
        """The contents of every block; equal ones take as long."""
        return [contents(piece.module) for piece in self.pieces]

    @property
    def is_repetitive(self) -> bool:
        """Whether most blocks are equal, as the layers of a transformer are."""
        return 2 * max(map(self.digests.count, self.digests)) > len(self)

    @property
    def share(self) -> float:
        """How much of the graph's work the different blocks hold."""
        weight = [sum(map(work, segment.nodes)) for segment in self.plan.segments]
        distinct = dict(zip(self.digests, weight, strict=True))
        return sum(distinct.values()) / max(sum(weight), 1e-9)

    def homes(self, way: Sequence[str]) -> dict[fx.Node, str]:
        """The engine of every node when block `i` runs on `way[i]`; what is recomputed goes with readers."""
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
        known: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        fed = []
        for piece in self.pieces:
            fed.append([known[node] for node in piece.inputs])
            known.update(zip(piece.outputs, run_in_pytorch(piece.module, fed[-1]), strict=True))
        return fed

    def untimed(self) -> list[BlockCost]:
        """The blocks as findings list them, without costs."""
        bounds = [0, *self.places]
        return [
            BlockCost(bounds[number], len(segment.nodes), self.begins_at(number), digest)
            for number, (segment, digest) in enumerate(zip(self.plan.segments, self.digests, strict=True))
        ]

    def begins_at(self, number: int) -> str:
        """Where in the model a block begins, in words."""
        first = next(n for n in self.plan.segments[number].nodes if n not in self.line.recomputed)
        return module_path(first) or first.name


def find_blocks(module: fx.GraphModule, atomic: Sequence[Atomic], most: int) -> Blocks | None:
    """At most `most` blocks of like weight, cut where the fewest values are alive; None if there is but one.

    Groups in `atomic` are not split.
    """
    line = placement_line(module.graph)
    waists = _open(line, find_groups(module, atomic))
    weight = [work(node) for node in line.nodes]
    least = sum(weight) / most
    places: list[int] = []
    since, left = 0.0, sum(weight)
    for place, own in enumerate(weight):
        # A layer is rarely a round part of the whole: the first waist after nearly enough work ends a block,
        # where another layer begins, lest an activation or a norm be parted from the product it follows.
        enough = 0.8 if _begins_layer(line.nodes[place]) else 1.6
        if place in waists and since >= enough * least and left >= 0.5 * least:
            places.append(place)
            since = 0.0
        since, left = since + own, left - own
    blocks = Blocks(module, line, tuple(places))
    try:
        return blocks if places and blocks.plan else None
    except PartitionError:  # a value that cannot cross a border lies across one of the waists
        return None


def _begins_layer(node: fx.Node) -> bool:
    name = op_name(node).removeprefix("aten.").split(".")[0]
    return name.startswith(_FIRST) or "attention" in name


def blocks_at(module: fx.GraphModule, places: Sequence[int]) -> Blocks:
    """The blocks between places that are known already."""
    return Blocks(module, placement_line(module.graph), tuple(places))


def _open(line: Line, groups: Sequence[Sequence[fx.Node]]) -> Mapping[int, None]:
    """The waists that divide no group."""
    spans = [[line.index[node] for node in group] for group in groups]
    closed = {place for span in spans for place in range(min(span) + 1, max(span) + 1)}
    return {waist.place: None for waist in line.waists() if waist.place not in closed}
