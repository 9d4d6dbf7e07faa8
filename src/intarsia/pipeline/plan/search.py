"""The fastest pipeline for a cluster: bounds in closed form order the layouts, and the best are simulated.

A layout is simulated only if what it cannot fall below is less than the best time found. The bounds are
proved, so what is left out is never better (a test compares with trying everything).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.plan.simulate import StageTable, Vector, end_times, peak_memory
from intarsia.pipeline.plan.space import Layout, Space, near_memory, near_seconds
from intarsia.pipeline.schedules import SCHEDULES, Whole, slot_table

ROUNDING = 1e-9  # sums taken in another order differ in the last bits


@dataclass(frozen=True)
class Candidate:
    """A layout with its cuts and what it is predicted to cost."""

    layout: Layout
    cuts: tuple[int, ...]
    step_time: float
    bubble: float  # the idle share of the ranks' time
    memory: int  # bytes of the fullest device

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.layout.schedule

    @property
    def microbatches(self) -> int:
        """How many micro-batches a step of one replica has."""
        return self.layout.microbatches

    @property
    def per_rank(self) -> int:
        """How many stages a rank holds."""
        return self.layout.per_rank

    @property
    def checkpoint(self) -> bool:
        """Whether stages are computed again in the backward pass."""
        return self.layout.checkpoint

    def __str__(self) -> str:
        a = self.layout
        mode = "recomputing" if a.checkpoint else "keeping"
        replicas = f" x {a.replicas} replicas" if a.replicas > 1 else ""
        return (
            f"{a.schedule:<16}{a.stages:>5} stages on {a.ranks} ranks{replicas},"
            f" {a.microbatches} micro-batches of {a.samples}, {mode:<11} {self.step_time * 1e3:10.2f} ms"
            f"  bubble {self.bubble:4.0%}  {_size(self.memory)}"
        )


def search(space: Space) -> list[Candidate]:
    """What was the best in turn, fastest first: the first is the best there is. Nothing fits: an error.

    Whatever has the least bound comes next: a layout gets cuts and with them a nearer bound, and one with
    cuts is simulated. So no layout is simulated whose nearer bound is above the best time there is.
    """
    groups, which, ranks, bounds = _bounded(space)
    waiting: list[tuple[float, int, _Cut | None]] = [(float(b), i, None) for i, b in enumerate(bounds)]
    heapify(waiting)
    candidates: list[Candidate] = []
    best = np.inf
    while waiting and waiting[0][0] * (1 - ROUNDING) < best:
        _, at, cut = heappop(waiting)
        if cut is None:
            layout = replace(groups[int(which[at])], ranks=int(ranks[at]))
            for nearer in _cuts(space, layout):
                heappush(waiting, (nearer.bound, len(bounds) + 2 * at + nearer.by_memory, nearer))
            continue
        answer = _simulated(space, cut, best)
        if answer is not None:
            candidates.append(answer)
            best = answer.step_time
    if not candidates:
        raise PartitionError(_nothing(space, bool(groups)))
    return candidates[::-1]


def every_candidate(space: Space) -> list[Candidate]:
    """All layouts, each with the faster of its cuts, fastest first."""
    candidates = [
        answer
        for group, counts in _groups(space)
        for ranks in counts.tolist()
        if (answer := simulate_layout(space, replace(group, ranks=ranks))) is not None
    ]
    return sorted(candidates, key=lambda c: (c.step_time, c.memory))


def simulate_layout(space: Space, layout: Layout) -> Candidate | None:
    """What a layout costs with the faster of its cuts, by time and by memory; None where neither fits."""
    candidates = [c for cut in _cuts(space, layout) if (c := _simulated(space, cut)) is not None]
    return min(candidates, key=lambda c: c.step_time, default=None)


@dataclass(frozen=True)
class _Cut:
    """A layout with cuts that may fit the memory, and the least it takes."""

    layout: Layout
    by_memory: bool
    cuts: tuple[int, ...]
    table: StageTable
    links: Vector
    averaging: Vector
    bound: float


def _cuts(space: Space, layout: Layout) -> Iterator[_Cut]:
    for by_memory in (False, True):
        cuts, table = space.table(layout, by_memory)
        if (near_memory(layout, table, space.weight_copies) <= space.cluster.memory).all():
            links, averaging = space.links(layout, table), space.averaging(layout, table)
            bound = near_seconds(layout, table, links, averaging)
            yield _Cut(layout, by_memory, cuts, table, links, averaging, bound)


def _simulated(space: Space, cut: _Cut, best: float = np.inf) -> Candidate | None:
    """What it costs; None where it does not fit, or is no faster than `best`."""
    layout, table = cut.layout, cut.table
    slots = slot_table(layout.schedule, layout.ranks, layout.microbatches, layout.per_rank)
    by_stage = peak_memory(slots, table, layout.checkpoint, space.weight_copies)
    memory = by_stage.reshape(layout.per_rank, layout.ranks).sum(axis=0)
    if (memory > space.cluster.memory).any():
        return None
    ends = end_times(slots, table, cut.links, layout.checkpoint, best)
    time = float((np.maximum.reduceat(ends, slots.begins[:-1]) + cut.averaging).max())
    if time >= best:
        return None
    busy = layout.microbatches * float(table.work(layout.checkpoint, layout.splits_backward).sum())
    idle = 1.0 - busy / (time * layout.ranks) if time > 0 else 0.0
    return Candidate(layout, cut.cuts, time, idle, int(memory.max()))


def _groups(space: Space) -> Iterator[tuple[Layout, Whole]]:
    """All layouts: those that differ in the ranks alone together, with their numbers of ranks."""
    for replicas, m, samples in space.divisions():
        for name in space.allowed.schedules:
            counts = space.rank_counts(name, replicas, m)
            for recompute in (False, True) if len(counts) else ():
                yield Layout(name, 0, SCHEDULES[name].per_rank, replicas, m, samples, recompute), counts


def _bounded(space: Space) -> tuple[list[Layout], Whole, Whole, Vector]:
    """Groups of layouts; and of each layout that may fit the memory its group, ranks and least seconds."""
    groups: list[Layout] = []
    which, ranks, bounds = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
    for group, counts in _groups(space):
        fits = space.least_memory(group, counts) <= space.cluster.memory
        which.append(np.full(int(fits.sum()), len(groups)))
        ranks.append(counts[fits])
        bounds.append(space.least_seconds(group, counts[fits]))
        groups.append(group)
    return groups, np.concatenate(which), np.concatenate(ranks), np.concatenate(bounds)


def _nothing(space: Space, any_layout: bool) -> str:
    if not any_layout:
        return (
            f"a batch of {space.batch} cannot be divided into micro-batches of {space.allowed.least} or more"
            f" samples for the schedules {list(space.allowed.schedules)}"
        )
    total = float(space.line.weights.sum()) * space.weight_copies
    return (
        f"memory={space.cluster.memory} a device is too little on {space.cluster.devices} devices:"
        f" weights, gradients and the optimizer's moments take {total:.0f} bytes, and more waits for backward"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
