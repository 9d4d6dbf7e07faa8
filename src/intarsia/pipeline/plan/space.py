"""What is searched: every way to lay a model's pipeline out on a cluster, and what each costs at least.

Rank r starts when the first micro-batch has come to it (P the work of the stages before it, forward), does m
times its own work w, and what it gave must travel back: T >= P + m * w for every rank. Of all cuts of a total
W over n ranks, the one that is even in this sense has T = W / (1 - (1 - 1/m) ** n). A schedule is known here
by what its definition says, so the bounds hold for one that somebody adds, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.balance.solver import even_cuts, prefix_sums, smallest_bottleneck
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.cluster import Cluster
from intarsia.pipeline.plan.simulate import StageTable, Vector
from intarsia.pipeline.schedules import FORWARD, SCHEDULES, Definition, Whole


@dataclass(frozen=True)
class LayerLine:
    """Costs by layer; the seconds of a pass grow with the samples of a micro-batch from a fixed part on.

    Rows of `fixed` and `each` are those of `StageTable.seconds`: the forward pass, the gradients of inputs
    and of weights, and what these take longer apart.
    """

    fixed: Vector  # 4 x layers: seconds whatever the size
    each: Vector  # 4 x layers: seconds more for each sample
    saved: Vector  # bytes kept for backward, a sample
    weights: Vector  # bytes of parameters and buffers
    crossing: Vector  # bytes that cross after each layer, a sample; the last entry means nothing
    measured: dict[int, Vector] = field(default_factory=dict)  # seconds by samples, where they are known

    def __len__(self) -> int:
        return len(self.weights)

    @staticmethod
    def of(
        runs: Sequence[tuple[int, Sequence[Cost]]], crossing: Sequence[float], saved: Sequence[float]
    ) -> LayerLine:
        """The line of costs measured with one size of micro-batch or more; beyond those they are a line.

        >>> line = LayerLine.of([(1, [Cost(2.0)]), (4, [Cost(5.0)])], [0.0], [0.0])
        >>> float(line.seconds(8)[0, 0])
        9.0
        """
        if not runs:
            raise PartitionError(
                "a line of layers needs costs measured with one size of micro-batch at least"
            )
        (small, first), (large, last) = runs[0], runs[-1]
        low, high = _seconds(first), _seconds(last)
        if large > small:
            # Noise may make the larger micro-batch the faster one; time never falls with size.
            each = np.maximum(0.0, (high - low) / (large - small))
            fixed = np.maximum(0.0, low - each * small)
            each = np.where(fixed > 0, each, high / large)
        else:
            fixed, each = np.zeros_like(low), low / small
        weights = np.array([float(c.weights) for c in first])
        between = {samples: _seconds(costs) for samples, costs in runs[1:-1]}
        return LayerLine(fixed, each, np.asarray(saved, float), weights, np.asarray(crossing, float), between)

    def seconds(self, samples: int, speed: float = 1.0) -> Vector:
        """4 x layers: the seconds of a micro-batch of so many samples."""
        known = self.measured.get(samples)
        total: Vector = (self.fixed + self.each * samples if known is None else known) / speed
        return total

    def cuts(self, weights: Vector, stages: int) -> tuple[int, ...]:
        """Where to cut so that the heaviest of so many stages is as light as can be."""
        sums = prefix_sums(weights.tolist())
        return tuple(even_cuts(sums, stages, smallest_bottleneck(sums, stages))[1:-1])

    def stages(
        self, cuts: Sequence[int], samples: int, speed: float = 1.0, handover: float = 0.0
    ) -> StageTable:
        """The stages between cuts, for micro-batches of so many samples."""
        starts = [0, *cuts]
        seconds = np.add.reduceat(self.seconds(samples, speed), starts, axis=1)
        # Nobody asks the first stage for a gradient of inputs: all of its backward pass is the weights'.
        seconds[1:, 0] = 0.0, seconds[1:3, 0].sum(), 0.0
        return StageTable(
            seconds,
            np.add.reduceat(self.saved * samples, starts),
            np.add.reduceat(self.weights, starts),
            self.crossing[np.array(cuts, int) - 1] * samples,
            handover,
        )


def _seconds(costs: Sequence[Cost]) -> Vector:
    rows = [[c.forward, c.backward_input, c.backward_weight, c.apart] for c in costs]
    return np.array(rows, float).T.reshape(4, len(costs))


def merge(costs: Sequence[Cost], places: Sequence[int]) -> list[Cost]:
    """Costs of nodes summed between places: the layers of a line whose nodes are too many or may not part."""
    sums = list(accumulate(costs, initial=Cost()))
    bounds = [0, *places, len(costs)]
    layers = []
    for a, b in pairwise(bounds):
        x, y = sums[a], sums[b]
        layers.append(
            Cost(
                max(0.0, y.forward - x.forward),
                max(0.0, y.backward_input - x.backward_input),
                max(0.0, y.backward_weight - x.backward_weight),
                y.saved - x.saved,
                y.weights - x.weights,
                max(0.0, y.apart - x.apart),
            )
        )
    return layers


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

    @property
    def definition(self) -> Definition:
        """What is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed apart."""
        return self.definition.splits_backward and not self.checkpoint


@dataclass(frozen=True)
class Allowed:
    """Which layouts a search may choose; None allows all."""

    least: int = 1  # samples of a micro-batch, at least
    most: int | None = None  # and at most
    schedules: Sequence[str] = field(default_factory=lambda: tuple(SCHEDULES))
    microbatches: Sequence[int] | None = None
    replicas: Sequence[int] | None = None
    ranks: int | None = None  # so many and no other number


@dataclass
class Space:
    """What is searched: a line of layers, a cluster, a batch, and which layouts may be."""

    line: LayerLine
    cluster: Cluster
    batch: int
    allowed: Allowed = field(default_factory=Allowed)
    weight_copies: int = 4
    cut: Callable[[Vector, int], Sequence[int]] | None = None  # from the weights of layers, and stages
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
        """The numbers of ranks such a schedule can run on."""
        definition = SCHEDULES[schedule]
        most = min(self.cluster.devices // replicas, len(self.line) // definition.per_rank)
        key = schedule, most, m
        if key not in self._ranks:
            # On one rank no transfer overlaps with work, so the plain order is enough.
            least = 2 if definition.interleaved or definition.splits_backward else 1
            only = self.allowed.ranks
            right = [
                p
                for p in range(least, most + 1)
                if only in (None, p)
                and (m % p == 0 or not definition.divides)
                and definition.refusal(p, m) is None
            ]
            self._ranks[key] = np.array(right, np.int64)
        return self._ranks[key]

    def table(self, layout: Layout, by_memory: bool) -> tuple[tuple[int, ...], StageTable]:
        """The cuts of a layout, and its stages."""
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
        """The seconds each rank spends on averaging its gradients over the replicas, in a ring."""
        if layout.replicas == 1:
            return np.zeros(layout.ranks)
        link = self.cluster.averaging(layout.ranks, layout.replicas)
        held = table.weights.reshape(layout.per_rank, layout.ranks).sum(axis=0)
        rounds = 2 * (layout.replicas - 1)
        ring: Vector = rounds * link.latency + rounds / layout.replicas * held / link.bandwidth
        return ring

    def least_memory(self, layout: Layout, ranks: Whole) -> Vector:
        """Bytes the fullest of so many ranks holds at least: the mean, or the largest layer's weights."""
        weights = self.line.weights * self.weight_copies
        saved = 0.0 if layout.checkpoint else float(self.line.saved.sum()) * layout.samples
        mean: Vector = (float(weights.sum()) + saved) / ranks
        return np.maximum(mean, float(weights.max()))

    def least_seconds(self, layout: Layout, ranks: Whole) -> Vector:
        """Seconds of a step at least on so many ranks, whatever the cuts."""
        cluster, m, replicas = self.cluster, layout.microbatches, layout.replicas
        stages = ranks * layout.per_rank
        hand = np.where(stages > 1, cluster.handover, 0.0)
        passes = self.line.seconds(layout.samples, cluster.speed)[:3]
        layers = passes.sum(axis=0) + (passes[0] if layout.checkpoint else 0.0)
        work = layers.sum() + 2 * hand * stages
        bound = m * np.maximum(work / ranks, layers.max() + 2 * hand)
        travel = work
        if layout.definition.splits_backward:
            # What comes before a rank is forward passes alone: of each stage's work at least this part.
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


def near_seconds(layout: Layout, table: StageTable, links: Vector, averaging: Vector) -> float:
    """Seconds of a step at least, with the cuts known."""
    n, m = layout.ranks, layout.microbatches
    work = table.work(layout.checkpoint, layout.splits_backward)
    own = work.reshape(layout.per_rank, n).sum(axis=0)
    forward = table.seconds[0][:n] + table.handover
    back = work[:n] - forward
    split = layout.definition.splits_backward
    if split:
        back = np.zeros(n)  # weight gradients may run while the others' gradients travel
    wires = links[: n - 1] * (1 if split else 2)
    before = np.concatenate([[0.0], np.cumsum((forward + back)[:-1] + wires)])
    travel = float((table.seconds[:2] + table.handover).sum() + 2 * links.sum())
    return max(float((before + m * own).max() + averaging.min()), float((m * own + averaging).max()), travel)


def near_memory(layout: Layout, table: StageTable, weight_copies: int) -> Vector:
    """Bytes of each rank at least, with the cuts known."""
    held = table.weights * weight_copies + table.saved
    if not layout.checkpoint and layout.per_rank == 1:
        # The first rank's own order says how many micro-batches wait there; it takes no other rank to know.
        held[0] += table.saved[0] * (_held_first(layout.definition, layout.ranks, layout.microbatches) - 1)
    by_rank: Vector = held.reshape(layout.per_rank, layout.ranks).sum(axis=0)
    return by_rank


def _held_first(definition: Definition, ranks: int, microbatches: int) -> int:
    """The forward passes that the first rank runs before anything else."""
    assert definition.order is not None
    count = 0
    for slot in definition.order(0, ranks, microbatches, 1):
        if slot.action is not FORWARD:
            break
        count += 1
    return count


def divisors(number: int) -> list[int]:
    """What divides a number, least first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
