"""The search space: every layout of a pipeline on a cluster, with lower bounds of its cost.

Let P be the work of all stages before rank r on one micro-batch, forward and backward. The rank starts after
the forward part of P, does its own work w on m micro-batches, and the backward part of P follows. So a step
takes T >= P + m * w on every rank. Among all cuts of the total work W over n ranks, the cut for which all
these bounds are equal has the least T = W / (1 - (1 - 1/m) ** n). The bounds use only the definition of a
schedule, so they also hold for schedules that users define.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.plan.cluster import Cluster
from intarsia.pipeline.plan.simulate import StageTable, Vector, pass_seconds
from intarsia.pipeline.schedules import FORWARD, SCHEDULES, Definition, Whole
from intarsia.pipeline.solver import even_cuts, prefix_sums, smallest_bottleneck


@dataclass(frozen=True)
class LayerLine:
    """Costs by layer. The seconds of a pass are a fixed part and a part for each sample of a micro-batch.

    The rows of `fixed` and `each` are those of `pass_seconds`.
    """

    fixed: Vector  # 4 x layers: seconds for any size
    each: Vector  # 4 x layers: extra seconds for each sample
    saved: Vector  # bytes that one sample keeps for the backward pass
    weights: Vector  # bytes of parameters and buffers
    crossing: Vector  # bytes of one sample that cross after each layer; the last entry is not used
    measured: dict[int, Vector] = field(default_factory=dict)  # seconds by samples, where measured

    def __len__(self) -> int:
        return len(self.weights)

    @staticmethod
    def of(
        runs: Sequence[tuple[int, Sequence[Cost]]], crossing: Sequence[float], saved: Sequence[float]
    ) -> LayerLine:
        """The costs from measurements at one micro-batch size or more; other sizes are on a straight line.

        >>> line = LayerLine.of([(1, [Cost(2.0)]), (4, [Cost(5.0)])], [0.0], [0.0])
        >>> float(line.seconds(8)[0, 0])
        9.0
        """
        if not runs:
            raise PartitionError("a line of layers needs costs measured with at least one micro-batch size")
        (small, first), (large, last) = runs[0], runs[-1]
        low, high = pass_seconds(first), pass_seconds(last)
        if large > small:
            # With noise, the larger micro-batch may measure faster; the slope is then 0.
            each = np.maximum(0.0, (high - low) / (large - small))
            fixed = np.maximum(0.0, low - each * small)
            each = np.where(fixed > 0, each, high / large)
        else:
            fixed, each = np.zeros_like(low), low / small
        weights = np.array([float(c.weights) for c in first])
        between = {samples: pass_seconds(costs) for samples, costs in runs[1:-1]}
        return LayerLine(fixed, each, np.asarray(saved, float), weights, np.asarray(crossing, float), between)

    def seconds(self, samples: int, speed: float = 1.0) -> Vector:
        """4 x layers: the seconds of a micro-batch with `samples` samples."""
        measured = self.measured.get(samples)
        seconds: Vector = (self.fixed + self.each * samples if measured is None else measured) / speed
        return seconds

    def cuts(self, weights: Vector, stages: int) -> tuple[int, ...]:
        """The cuts into `stages` stages that minimize the weight of the heaviest stage."""
        sums = prefix_sums(weights.tolist())
        return tuple(even_cuts(sums, stages, smallest_bottleneck(sums, stages))[1:-1])

    def stages(
        self, cuts: Sequence[int], samples: int, speed: float = 1.0, handover: float = 0.0
    ) -> StageTable:
        """The stages between cuts, for micro-batches with `samples` samples."""
        starts = [0, *cuts]
        seconds = np.add.reduceat(self.seconds(samples, speed), starts, axis=1)
        # The inputs of the first stage need no gradient: all of its backward pass is for the weights.
        seconds[1:, 0] = 0.0, seconds[1:3, 0].sum(), 0.0
        return StageTable(
            seconds,
            np.add.reduceat(self.saved * samples, starts),
            np.add.reduceat(self.weights, starts),
            self.crossing[np.array(cuts, int) - 1] * samples,
            handover,
        )


def merge(costs: Sequence[Cost], places: Sequence[int]) -> list[Cost]:
    """The costs of layers: the sums of the costs of nodes between places."""
    return [total(costs[a:b]) for a, b in pairwise([0, *places, len(costs)])]


@dataclass(frozen=True)
class Layout:
    """A use of a cluster: the ranks of a pipeline, its replicas, and how each step runs."""

    schedule: str
    ranks: int
    per_rank: int
    replicas: int
    microbatches: int
    samples: int  # of a micro-batch
    checkpoint: bool

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.ranks * self.per_rank

    @property
    def devices(self) -> int:
        """The number of devices in use."""
        return self.ranks * self.replicas

    @property
    def definition(self) -> Definition:
        """The definition of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed separately."""
        return self.definition.splits_backward and not self.checkpoint


@dataclass(frozen=True)
class Allowed:
    """The layouts that a search may choose; None allows all values."""

    least: int = 1  # the least samples of a micro-batch
    most: int | None = None  # the most samples of a micro-batch
    schedules: Sequence[str] = field(default_factory=lambda: tuple(SCHEDULES))
    microbatches: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    ranks: int | None = None


@dataclass
class Space:
    """The search space: a line of layers, a cluster, a batch, and the layouts that are allowed."""

    line: LayerLine
    cluster: Cluster
    batch: int
    allowed: Allowed = field(default_factory=Allowed)
    weight_copies: int = 4
    cut: Callable[[Vector, int], Sequence[int]] | None = None  # (weights of layers, stages) -> cuts
    _cuts: dict[tuple[int, int, bool], tuple[int, ...]] = field(init=False, default_factory=dict)
    _ranks: dict[tuple[str, int, int], Whole] = field(init=False, default_factory=dict)

    def divisions(self) -> Iterator[tuple[int, int, int]]:
        """Every (replicas, micro-batches, samples) that divides the batch."""
        allowed = self.allowed
        for replicas in divisors(self.batch):
            if replicas > self.cluster.devices or (allowed.replicas and replicas not in allowed.replicas):
                continue
            share = self.batch // replicas
            for samples in divisors(share):
                m = share // samples
                if allowed.least <= samples <= (allowed.most or samples) and (
                    allowed.microbatches is None or m in allowed.microbatches
                ):
                    yield replicas, m, samples

    def rank_counts(self, schedule: str, replicas: int, m: int) -> Whole:
        """The numbers of ranks that the schedule can run on."""
        definition = SCHEDULES[schedule]
        most = min(self.cluster.devices // replicas, len(self.line) // definition.per_rank)
        key = schedule, most, m
        if key not in self._ranks:
            # On one rank there is no bubble to fill, so the plain order is enough.
            least = 2 if definition.interleaved or definition.splits_backward else 1
            counts = [
                ranks
                for ranks in range(least, most + 1)
                if self.allowed.ranks in (None, ranks)
                and (m % ranks == 0 or not definition.divides)
                and definition.refusal(ranks, m) is None
            ]
            self._ranks[key] = np.array(counts, np.int64)
        return self._ranks[key]

    def table(self, layout: Layout, by_memory: bool) -> tuple[tuple[int, ...], StageTable]:
        """The cuts of a layout, balanced by time or by memory, and its stages."""
        key = layout.stages, layout.samples, by_memory
        if key not in self._cuts:
            line = self.line
            if by_memory:
                weights = line.saved * layout.samples + line.weights * self.weight_copies
            else:
                weights = line.seconds(layout.samples)[:3].sum(axis=0)
            self._cuts[key] = tuple((self.cut or line.cuts)(weights, layout.stages))
        cuts = self._cuts[key]
        handover = self.cluster.handover if layout.stages > 1 else 0.0
        return cuts, self.line.stages(cuts, layout.samples, self.cluster.speed, handover)

    def links(self, layout: Layout, table: StageTable) -> Vector:
        """The seconds from each stage to the next."""
        chain = self.cluster.chain(layout.ranks, layout.replicas)
        return np.array([chain[s % layout.ranks].seconds(b) for s, b in enumerate(table.borders)])

    def averaging(self, layout: Layout, table: StageTable) -> Vector:
        """The seconds in which each rank averages its gradients over the replicas, in a ring."""
        if layout.replicas == 1:
            return np.zeros(layout.ranks)
        link = self.cluster.averaging(layout.ranks, layout.replicas)
        held = table.weights.reshape(layout.per_rank, layout.ranks).sum(axis=0)
        rounds = 2 * (layout.replicas - 1)
        ring: Vector = rounds * link.latency + rounds / layout.replicas * held / link.bandwidth
        return ring

    def least_memory(self, layout: Layout, ranks: Whole) -> Vector:
        """A lower bound of the bytes on the fullest rank: the mean, or the weights of the largest layer."""
        weights = self.line.weights * self.weight_copies
        saved = 0.0 if layout.checkpoint else float(self.line.saved.sum()) * layout.samples
        mean: Vector = (float(weights.sum()) + saved) / ranks
        return np.maximum(mean, float(weights.max()))

    def least_seconds(self, layout: Layout, ranks: Whole) -> Vector:
        """A lower bound of the seconds of a step on each number of ranks, for any cuts."""
        cluster, m, replicas = self.cluster, layout.microbatches, layout.replicas
        stages = ranks * layout.per_rank
        hand = np.where(stages > 1, cluster.handover, 0.0)
        passes = self.line.seconds(layout.samples, cluster.speed)[:3]
        layers = passes.sum(axis=0) + (passes[0] if layout.checkpoint else 0.0)
        work = layers.sum() + 2 * hand * stages
        bound = m * np.maximum(work / ranks, layers.max() + 2 * hand)
        travel = work
        if layout.definition.splits_backward:
            # Only forward passes precede a rank's work: at least this part of the work of each stage.
            real = layers > 0
            part = min([0.5, *(passes[0][real] / layers[real]).tolist()])
            travel = passes[:2].sum() + 2 * hand * stages
            if part > 0:
                bound = np.maximum(bound, part * work / (1 - (1 - part / m) ** ranks))
        elif layout.per_rank == 1:
            bound = np.maximum(bound, work / (1 - (1 - 1 / m) ** ranks))
        bound = np.maximum(bound, travel + 2 * (stages - 1) * self._least_link(layout.samples))
        if replicas == 1:
            return np.asarray(bound)
        rounds = 2 * (replicas - 1)
        inside = ranks * replicas <= cluster.per_host
        latency = np.where(inside, cluster.within.latency, cluster.between.latency) * rounds
        bandwidth = np.where(inside, cluster.within.bandwidth, cluster.between.bandwidth)
        mean = rounds / replicas * float(self.line.weights.sum()) / ranks / bandwidth
        return np.asarray(np.maximum(bound + latency, m * work / ranks + latency + mean))

    def _least_link(self, samples: int) -> float:
        cluster = self.cluster
        count = float(self.line.crossing[:-1].min()) * samples if len(self.line) > 1 else 0.0
        return min(cluster.within.seconds(count), cluster.between.seconds(count))


def least_seconds_of(layout: Layout, table: StageTable, links: Vector, averaging: Vector) -> float:
    """A lower bound of the seconds of a step with these stages; tighter than `Space.least_seconds`."""
    n, m = layout.ranks, layout.microbatches
    work = table.work(layout.checkpoint, layout.splits_backward)
    own = work.reshape(layout.per_rank, n).sum(axis=0)
    forward = table.seconds[0][:n] + table.handover
    back = work[:n] - forward
    split = layout.definition.splits_backward
    if split:
        back = np.zeros(n)  # weight gradients may run while other ranks send theirs
    wires = links[: n - 1] * (1 if split else 2)
    before = np.concatenate([[0.0], np.cumsum((forward + back)[:-1] + wires)])
    travel = float((table.seconds[:2] + table.handover).sum() + 2 * links.sum())
    return max(float((before + m * own).max() + averaging.min()), float((m * own + averaging).max()), travel)


def least_memory_of(layout: Layout, table: StageTable, weight_copies: int) -> Vector:
    """A lower bound of the bytes on each rank with these stages; tighter than `Space.least_memory`."""
    held = table.weights * weight_copies + table.saved
    if not layout.checkpoint and layout.per_rank == 1:
        # The first rank holds as many micro-batches as its order has forward passes at the start.
        assert layout.definition.order is not None
        slots = layout.definition.order(0, layout.ranks, layout.microbatches, 1)
        held[0] += table.saved[0] * (sum(1 for _ in takewhile(lambda s: s.action is FORWARD, slots)) - 1)
    by_rank: Vector = held.reshape(layout.per_rank, layout.ranks).sum(axis=0)
    return by_rank


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
