"""Simulating a schedule with known costs: how long a training step takes, how much memory it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.schedule.schedules import Action, Schedule, Slot


@dataclass(frozen=True)
class Span:
    """A slot with its rank, start and end."""

    rank: int
    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule is predicted to do: seconds, idle share, bytes by stage, and when each slot runs."""

    schedule: Schedule
    step_time: float
    bubble: float  # the idle share of all ranks' time
    peak_memory: tuple[int, ...]  # bytes by stage: weights and what waits for its backward pass
    timeline: tuple[Span, ...]

    @property
    def peak_memory_by_rank(self) -> tuple[int, ...]:
        """Bytes by rank: the sum over its stages (their peaks taken as one)."""
        out = [0] * len(self.schedule.ranks)
        for rank, steps in enumerate(self.schedule.ranks):
            out[rank] = sum(self.peak_memory[s] for s in sorted({slot.stage for slot in steps}))
        return tuple(out)


def simulate(
    schedule: Schedule,
    costs: Sequence[Cost],
    *,
    links: Sequence[float] | None = None,
    borders: Sequence[int] | None = None,
    checkpoint: bool = False,
    weight_copies: int = 4,
) -> Simulation:
    """Run `schedule` with the costs of each stage for one micro-batch.

    `links[i]` is the seconds from stage i to i + 1 (and back), `borders[i]` the bytes. With `checkpoint` a
    stage keeps only its input and runs forward again before backward. A rank does one thing at a time and
    sends while it computes.

    >>> from intarsia.pipeline.schedule.schedules import schedule
    >>> s = simulate(schedule("GPipe", 2, 4), [Cost(1.0, 1.0, 0.0)] * 2)
    >>> s.step_time, round(s.bubble, 2)
    (10.0, 0.2)
    """
    _check(schedule, costs, links, borders)
    wires = list(links) if links is not None else [0.0] * (schedule.stages - 1)
    done: dict[Slot, float] = {}
    clock = [0.0] * len(schedule.ranks)
    place = [0] * len(schedule.ranks)
    spans: list[Span] = []
    left = sum(map(len, schedule.ranks))
    while left:
        before = left
        for rank, steps in enumerate(schedule.ranks):
            while place[rank] < len(steps):
                slot = steps[place[rank]]
                ready = _ready(slot, done, wires, schedule.stages)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                end = start + seconds(slot.action, costs[slot.stage], checkpoint)
                clock[rank] = done[slot] = end
                spans.append(Span(rank, slot, start, end))
                place[rank] += 1
                left -= 1
        if left == before:
            stuck = [str(s[p]) for s, p in zip(schedule.ranks, place, strict=True) if p < len(s)]
            raise PartitionError(
                f"the schedule waits for itself: the ranks are stuck before {', '.join(stuck)}"
            )
    time = max(clock)
    busy = sum(s.end - s.start for s in spans)
    idle = 1.0 - busy / (time * len(schedule.ranks)) if time > 0 else 0.0
    spans.sort(key=lambda s: (s.start, s.rank, s.end))
    memory = _memory(schedule, spans, costs, borders, checkpoint, weight_copies)
    return Simulation(schedule, time, idle, memory, tuple(spans))


def seconds(action: Action, cost: Cost, checkpoint: bool = False) -> float:
    """How long an action takes; with `checkpoint` the forward pass runs again in front of the backward.

    The weights' gradients then come with the inputs': they would need the forward pass once more.
    """
    if action is Action.FORWARD:
        return cost.forward
    if action is Action.BACKWARD:
        return cost.backward + (cost.forward if checkpoint else 0.0)
    if checkpoint:
        return cost.forward + cost.backward if action is Action.INPUT else 0.0
    return cost.backward_input if action is Action.INPUT else cost.backward_weight


def _ready(slot: Slot, done: dict[Slot, float], links: Sequence[float], stages: int) -> float | None:
    """When everything the slot needs is there; None while something has not run."""
    times = []
    for need, wait in _needs(slot, links, stages):
        ends = [done[n] for n in need if n in done]
        if not ends:
            return None
        times.append(min(ends) + wait)
    return max(times, default=0.0)


def _needs(slot: Slot, links: Sequence[float], stages: int) -> list[tuple[list[Slot], float]]:
    """What must have run, as lists of equal choices, and how long its result travels."""
    stage, m = slot.stage, slot.microbatch
    if slot.action is Action.FORWARD:
        return [([Slot(stage - 1, Action.FORWARD, m)], links[stage - 1])] if stage else []
    if slot.action is Action.WEIGHT:
        return [([Slot(stage, Action.INPUT, m)], 0.0)]
    needs = [([Slot(stage, Action.FORWARD, m)], 0.0)]
    if stage + 1 < stages:
        after = [Slot(stage + 1, a, m) for a in (Action.BACKWARD, Action.INPUT)]
        needs.append((after, links[stage]))
    return needs


def _memory(
    schedule: Schedule,
    spans: Sequence[Span],
    costs: Sequence[Cost],
    borders: Sequence[int] | None,
    checkpoint: bool,
    weight_copies: int,
) -> tuple[int, ...]:
    """The most bytes each stage holds at once: from a forward's start to the end of its last gradient."""
    entering = [0, *(borders if borders is not None else [0] * (schedule.stages - 1))]
    peaks = []
    for stage in range(schedule.stages):
        cost = costs[stage]
        kept = entering[stage] if checkpoint else cost.saved
        base = cost.weights * weight_copies
        events: list[tuple[float, int, int]] = []
        for span in spans:
            if span.slot.stage != stage:
                continue
            if span.slot.action is Action.FORWARD:
                events.append((span.start, 1, kept))
            elif span.slot.action in (Action.BACKWARD, Action.WEIGHT):
                events.append((span.end, 0, -kept))
            if checkpoint and span.slot.action in (Action.BACKWARD, Action.INPUT):
                events += [(span.start, 1, cost.saved), (span.end, 0, -cost.saved)]
        now = peak = base
        for _, _, change in sorted(events):
            now += change
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def _check(
    schedule: Schedule, costs: Sequence[Cost], links: Sequence[float] | None, borders: Sequence[int] | None
) -> None:
    if len(costs) != schedule.stages:
        raise PartitionError(f"{len(costs)} costs for {schedule.stages} stages")
    for name, value in (("links", links), ("borders", borders)):
        if value is not None and len(value) != schedule.stages - 1:
            raise PartitionError(f"{len(value)} {name} for {schedule.stages - 1} borders")
