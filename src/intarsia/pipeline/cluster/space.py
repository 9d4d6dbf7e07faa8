"""What is searched: every way to lay a model's pipeline out on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from intarsia.pipeline.cluster.cluster import Cluster
from intarsia.pipeline.cluster.layers import LayerLine, StageTable, Vector, Whole
from intarsia.pipeline.schedule.schedules import SCHEDULES


@dataclass(frozen=True)
class Layout:
    """How a cluster is used: ranks of a pipeline, its replicas, and how each step runs."""

    schedule: str
    ranks: int
    per_rank: int
    replicas: int
    microbatches: int
    samples: int  # of a micro-batch
    checkpoint: bool

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.per_rank

    @property
    def devices(self) -> int:
        """How many devices work."""
        return self.ranks * self.replicas


@dataclass
class Space:
    """What is searched: a line of layers, a cluster, a batch, and which layouts may be."""

    line: LayerLine
    cluster: Cluster
    batch: int
    least: int = 1  # samples of a micro-batch, at least
    most: int | None = None  # and at most
    schedules: Sequence[str] = tuple(SCHEDULES)
    microbatches: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    weight_copies: int = 4
    _cuts: dict[tuple[int, int, bool], tuple[int, ...]] = field(default_factory=dict)

    def divisions(self) -> Iterator[tuple[int, int, int]]:
        """Every (replicas, micro-batches, samples) that divides the batch."""
        for replicas in divisors(self.batch):
            if replicas > self.cluster.devices or (self.replicas and replicas not in self.replicas):
                continue
            share = self.batch // replicas
            for samples in divisors(share):
                m = share // samples
                if self.least <= samples <= (self.most or samples) and (
                    self.microbatches is None or m in self.microbatches
                ):
                    yield replicas, m, samples

    def ranks(self, schedule: str, per_rank: int, replicas: int, m: int) -> Whole:
        """The numbers of ranks such a schedule can run on."""
        most = min(self.cluster.devices // replicas, len(self.line) // per_rank)
        if schedule == "1F1B":
            most = min(most, m)
        p = np.arange(1 if schedule in ("GPipe", "1F1B") else 2, most + 1)
        if schedule in ("Interleaved1F1B", "ZeroBubble"):
            p = p[m % np.maximum(1, m // p) == 0]
        return p[m % p == 0] if schedule == "Interleaved1F1B" else p

    def table(self, layout: Layout, by_memory: bool) -> tuple[tuple[int, ...], StageTable]:
        """The cuts of a layout, and its stages."""
        key = layout.stages, layout.samples, by_memory
        if key not in self._cuts:
            line = self.line
            if by_memory:
                weights = line.saved * layout.samples + line.weights * self.weight_copies
            else:
                weights = line.seconds(layout.samples).sum(axis=0)
            self._cuts[key] = line.cuts(weights, layout.stages)
        cuts = self._cuts[key]
        handover = self.cluster.handover if layout.stages > 1 else 0.0
        return cuts, StageTable.of(self.line, cuts, layout.samples, self.cluster.speed, handover)

    def links(self, layout: Layout, table: StageTable) -> Vector:
        """The seconds from each stage to the next."""
        chain = self.cluster.chain(layout.ranks, layout.replicas)
        return np.array([chain[s % layout.ranks].seconds(b) for s, b in enumerate(table.borders)])

    def averaging(self, layout: Layout, table: StageTable) -> Vector:
        """The seconds each rank spends on averaging its gradients over the replicas, in a ring."""
        if layout.replicas == 1:
            return np.zeros(layout.ranks)
        link = self.cluster.averaging(layout.ranks, layout.replicas)
        held = table.weights.reshape(layout.per_rank, layout.ranks).sum(axis=0)
        rounds = 2 * (layout.replicas - 1)
        ring: Vector = rounds * link.latency + rounds / layout.replicas * held / link.bandwidth
        return ring


def divisors(number: int) -> list[int]:
    """What divides a number, least first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
