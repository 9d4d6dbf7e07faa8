"""The search for the fastest layout on a cluster. Lower bounds order the layouts; the best are simulated.

A layout is simulated only if its lower bound is less than the best time so far. The bounds are proved, so
no better layout is skipped (a test compares with a simulation of all layouts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from intarsia.drawing import bytes_text
from intarsia.errors import PartitionError
from intarsia.pipeline.plan.simulate import StageTable, Vector, end_times, peak_memory
from intarsia.pipeline.plan.space import Layout, Space, least_memory_of, least_seconds_of
from intarsia.pipeline.schedules import SCHEDULES, Whole, slot_table

ROUNDING = 1e-9  # relative difference of sums that are added in another order


@dataclass(frozen=True)
class Candidate(Layout):
    """A layout with its cuts and its predicted cost."""

    cuts: tuple[int, ...]
    step_time: float
    bubble: float  # the idle share of the ranks' time
    memory: int  # bytes of the device that holds the most

    def __str__(self) -> str:
        mode = "recomputing" if self.checkpoint else "keeping"
        replicas = f" x {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.schedule:<16}{self.stages:>5} stages on {self.ranks} ranks{replicas},"
            f" {self.microbatches} micro-batches of {self.samples}, {mode:<11}"
            f" {self.step_time * 1e3:10.2f} ms  bubble {self.bubble:4.0%}  {bytes_text(self.memory)}"
        )


def search(space: Space) -> list[Candidate]:
    """The layouts that were the best so far, fastest first; the first is the optimum. Raises if none fits.

    The layout with the smallest bound comes next. Its cuts have tighter bounds: those below the best time so
    far are simulated. The bounds of cuts save most simulations (7 instead of 374 for 1,024 devices).
    """
    groups, which, ranks, bounds = _bounded_layouts(space)
    candidates: list[Candidate] = []
    best = np.inf
    for at in np.argsort(bounds, kind="stable"):
        if bounds[at] * (1 - ROUNDING) >= best:
            break
        layout = replace(groups[which[at]], ranks=int(ranks[at]))
        for cut in sorted(_cuts(space, layout), key=lambda cut: cut.bound):
            if cut.bound * (1 - ROUNDING) < best and (candidate := _simulated(space, cut, best)) is not None:
                candidates.append(candidate)
                best = candidate.step_time
    if not candidates:
        raise PartitionError(_why_none_fits(space, bool(groups)))
    return candidates[::-1]


def every_candidate(space: Space) -> list[Candidate]:
    """All layouts that fit, each with the faster of its cuts, fastest first."""
    candidates = [
        candidate
        for group, counts in _groups(space)
        for ranks in counts.tolist()
        if (candidate := simulate_layout(space, replace(group, ranks=ranks))) is not None
    ]
    return sorted(candidates, key=lambda c: (c.step_time, c.memory))


def simulate_layout(space: Space, layout: Layout) -> Candidate | None:
    """A layout with the faster of its cuts, balanced by time or by memory; None if neither fits."""
    candidates = [c for cut in _cuts(space, layout) if (c := _simulated(space, cut)) is not None]
    return min(candidates, key=lambda c: c.step_time, default=None)


@dataclass(frozen=True)
class _Cut:
    """A layout with cuts that may fit the memory, and a lower bound of its seconds."""

    layout: Layout
    cuts: tuple[int, ...]
    table: StageTable
    links: Vector
    averaging: Vector
    bound: float


def _cuts(space: Space, layout: Layout) -> Iterator[_Cut]:
    for by_memory in (False, True):
        cuts, table = space.table(layout, by_memory)
        if (least_memory_of(layout, table, space.weight_copies) <= space.cluster.memory).all():
            links, averaging = space.links(layout, table), space.averaging(layout, table)
            bound = least_seconds_of(layout, table, links, averaging)
            yield _Cut(layout, cuts, table, links, averaging, bound)


def _simulated(space: Space, cut: _Cut, best: float = np.inf) -> Candidate | None:
    """The simulated candidate; None if it does not fit the memory, or is not faster than `best`."""
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
    return Candidate(**vars(layout), cuts=cut.cuts, step_time=time, bubble=idle, memory=int(memory.max()))


def _groups(space: Space) -> Iterator[tuple[Layout, Whole]]:
    """All layouts, as groups that differ only in the number of ranks: a layout and the numbers."""
    for replicas, m, samples in space.divisions():
        for name in space.allowed.schedules:
            counts = space.rank_counts(name, replicas, m)
            for recompute in (False, True) if len(counts) else ():
                yield Layout(name, 0, SCHEDULES[name].per_rank, replicas, m, samples, recompute), counts


def _bounded_layouts(space: Space) -> tuple[list[Layout], Whole, Whole, Vector]:
    """The groups; and for each layout that may fit the memory, its group, its ranks and its least seconds."""
    groups: list[Layout] = []
    which, ranks, bounds = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
    for group, counts in _groups(space):
        fits = space.least_memory(group, counts) <= space.cluster.memory
        which.append(np.full(int(fits.sum()), len(groups)))
        ranks.append(counts[fits])
        bounds.append(space.least_seconds(group, counts[fits]))
        groups.append(group)
    return groups, np.concatenate(which), np.concatenate(ranks), np.concatenate(bounds)


def _why_none_fits(space: Space, any_layout: bool) -> str:
    if not any_layout:
        return (
            f"a batch of {space.batch} cannot be divided into micro-batches of {space.allowed.least} or more"
            f" samples for the schedules {list(space.allowed.schedules)}"
        )
    total = float(space.line.weights.sum()) * space.weight_copies
    return (
        f"memory={space.cluster.memory} per device is too little on {space.cluster.devices} devices:"
        f" weights, gradients and the optimizer's moments take {total:.0f} bytes, and activations take more"
    )
