"""The fastest pipeline for a cluster: bounds in closed form order the candidates, and the best are simulated.

A candidate is simulated only if what it cannot fall below is less than the best time found. The bounds are
proved, so what is left out is never better (a test compares with trying everything).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.cluster.bounds import Group, least_memory, least_seconds, near_memory, near_seconds
from intarsia.pipeline.cluster.layers import Vector, Whole
from intarsia.pipeline.cluster.play import order, peak_memory, play
from intarsia.pipeline.cluster.space import Layout, Space
from intarsia.pipeline.schedule.schedules import refusal

ROUNDING = 1e-9  # sums taken in another order differ in the last bits


@dataclass(frozen=True)
class Found:
    """A layout with its cuts and what it is predicted to cost."""

    layout: Layout
    cuts: tuple[int, ...]
    step_time: float
    bubble: float  # the idle share of the ranks' time
    memory: int  # bytes of the fullest device

    def __str__(self) -> str:
        a = self.layout
        kept = "recomputing" if a.checkpoint else "keeping"
        return (
            f"{a.schedule:<16}{a.stages:>5} stages on {a.ranks} ranks x {a.replicas} replicas,"
            f" {a.microbatches} micro-batches of {a.samples}, {kept:<11} {self.step_time * 1e3:10.2f} ms"
            f"  bubble {self.bubble:4.0%}  {self.memory / 2**30:.2f} GiB"
        )


def layouts(space: Space) -> tuple[list[Group], Whole, Whole, Vector]:
    """All candidates: groups (all but the ranks), and of each candidate its group, ranks and least seconds.

    What cannot fit the memory is left out.
    """
    groups: list[Group] = []
    which, ranks, bounds = [], [], []
    for replicas, m, samples in space.divisions():
        for name in space.schedules:
            per_rank = 2 if name == "Interleaved1F1B" else 1
            p = space.ranks(name, per_rank, replicas, m)
            if not len(p):
                continue
            for recompute in (False, True):
                group = name, per_rank, recompute, replicas, m, samples
                fits = least_memory(space, group, p) <= space.cluster.memory
                which.append(np.full(int(fits.sum()), len(groups)))
                ranks.append(p[fits])
                bounds.append(least_seconds(space, group, p[fits]))
                groups.append(group)
    if not groups:
        return [], np.zeros(0, int), np.zeros(0, int), np.zeros(0)
    return groups, np.concatenate(which), np.concatenate(ranks), np.concatenate(bounds)


def simulate_layout(space: Space, layout: Layout, best: float = np.inf) -> Found | None:
    """What a layout costs with the faster of its cuts, by time and by memory, that fits.

    None where neither fits, or neither can be faster than `best`.
    """
    copies, found = space.weight_copies, None
    for by_memory in (False, True):
        cuts, table = space.table(layout, by_memory)
        if (near_memory(layout, table, copies) > space.cluster.memory).any():
            continue
        links, averaging = space.links(layout, table), space.averaging(layout, table)
        if near_seconds(layout, table, links, averaging) * (1 - ROUNDING) >= best:
            continue
        slots = order(layout.schedule, layout.ranks, layout.microbatches, layout.per_rank)
        memory = peak_memory(slots, table, layout.checkpoint, copies)
        if (memory > space.cluster.memory).any():
            continue
        time = float((play(slots, table, links, layout.checkpoint) + averaging).max())
        if time >= best:
            continue
        busy = layout.microbatches * float(table.work(layout.checkpoint).sum())
        idle = 1.0 - busy / (time * layout.ranks) if time > 0 else 0.0
        found, best = Found(layout, cuts, time, idle, int(memory.max())), time
    return found


def search(space: Space) -> list[Found]:
    """What was the best in turn, fastest first: the first is the best there is. Nothing fits: an error."""
    groups, which, ranks, bounds = layouts(space)
    found: list[Found] = []
    best = np.inf
    for at in np.argsort(bounds, kind="stable"):
        if bounds[at] * (1 - ROUNDING) >= best:
            break
        name, per_rank, recompute, replicas, m, samples = groups[int(which[at])]
        layout = Layout(name, int(ranks[at]), per_rank, replicas, m, samples, recompute)
        assert refusal(name, layout.ranks, m) is None
        answer = simulate_layout(space, layout, best)
        if answer is not None:
            found.append(answer)
            best = answer.step_time
    if not found:
        raise PartitionError(_nothing(space, groups))
    return found[::-1]


def _nothing(space: Space, groups: Sequence[object]) -> str:
    if not groups:
        return (
            f"a batch of {space.batch} cannot be divided into micro-batches of {space.least} or more samples"
            f" for the schedules {list(space.schedules)}"
        )
    total = float(space.line.weights.sum()) * space.weight_copies
    return (
        f"memory={space.cluster.memory} a device is too little on {space.cluster.devices} devices:"
        f" weights, gradients and the optimizer's moments take {total:.0f} bytes, and more waits for backward"
    )
