"""The simulation of a schedule with known costs (time and memory of a training step), and its chart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from intarsia.drawing import new_figure, save_figure
from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.schedules import FORWARD, WEIGHT, Action, Schedule, Slot, SlotTable

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """A slot with its rank, start and end."""

    rank: int
    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The prediction for a schedule: seconds, idle share, bytes by stage, and when each slot runs."""

    schedule: Schedule
    step_time: float
    bubble: float  # the idle share of all ranks' time
    peak_memory: tuple[int, ...]  # bytes by stage: weights and saved activations
    timeline: tuple[Span, ...]


@dataclass(frozen=True)
class StageTable:
    """Costs by stage for one micro-batch size. The rows of `seconds` are those of `pass_seconds`."""

    seconds: Vector  # 4 x stages
    saved: Vector
    weights: Vector
    borders: Vector  # bytes that cross after each stage but the last
    handover: float = 0.0  # seconds of each pass that are not computation

    @staticmethod
    def of(costs: Sequence[Cost], borders: Sequence[int] | None = None) -> StageTable:
        """The table of stages with these costs."""
        crossing = borders if borders is not None else [0] * (len(costs) - 1)
        return StageTable(
            pass_seconds(costs),
            np.array([float(c.saved) for c in costs]),
            np.array([float(c.weights) for c in costs]),
            np.array(crossing, float),
        )

    def work(self, recompute: bool, splits_backward: bool = False) -> Vector:
        """The seconds of all passes of each stage on a micro-batch."""
        both: Vector = self.seconds[:3].sum(axis=0) + 2 * self.handover
        if recompute:  # both gradients are computed together, after a second forward pass
            both = both + self.seconds[0]
        elif splits_backward:
            both = both + self.seconds[3]
        return both

    def passes(self, recompute: bool) -> Vector:
        """The seconds of each action on each stage.

        With `recompute`, the forward pass runs again before the backward pass. The gradients of the weights
        are then computed with those of the inputs: later, they would need another forward pass.
        """
        forward, inputs, weights, apart = self.seconds
        whole = inputs + weights + (forward if recompute else 0.0)
        parts = (whole, np.zeros_like(whole)) if recompute else (inputs, weights + apart)
        passes = np.stack([forward, whole, *parts])
        passes[:WEIGHT] += self.handover
        return passes


def pass_seconds(costs: Sequence[Cost]) -> Vector:
    """4 x costs: seconds of forward, input gradients, weight gradients, and the extra if these run apart."""
    rows = [[c.forward, c.backward_input, c.backward_weight, c.apart] for c in costs]
    return np.array(rows, float).T.reshape(4, len(costs))


def simulate(
    schedule: Schedule,
    costs: Sequence[Cost],
    *,
    links: Sequence[float] | None = None,
    borders: Sequence[int] | None = None,
    checkpoint: bool = False,
    weight_copies: int = 4,
) -> Simulation:
    """Simulate `schedule` with the costs of each stage for one micro-batch.

    `links[i]` is the seconds from stage i to i + 1 and back, and `borders[i]` the bytes. With `checkpoint`, a
    stage keeps only its input, and runs forward again before backward. A rank runs one slot at a time and
    sends while it computes.

    >>> from intarsia.pipeline.schedules import schedule
    >>> s = simulate(schedule("GPipe", 2, 4), [Cost(1.0, 1.0, 0.0)] * 2)
    >>> s.step_time, round(s.bubble, 2)
    (10.0, 0.2)
    """
    _check(schedule, costs, links, borders)
    table, slots = StageTable.of(costs, borders), schedule.table
    wires = np.array(links if links is not None else [0.0] * (schedule.stages - 1), float)
    ends = end_times(slots, table, wires, checkpoint)
    seconds = table.passes(checkpoint)[slots.actions, slots.stages]
    time = float(ends.max(initial=0.0))
    idle = 1.0 - float(seconds.sum()) / (time * len(schedule.ranks)) if time > 0 else 0.0
    spans = [
        Span(rank, slot, start, end)
        for (rank, slot), start, end in zip(
            ((rank, slot) for rank, steps in enumerate(schedule.ranks) for slot in steps),
            (ends - seconds).tolist(),
            ends.tolist(),
            strict=True,
        )
    ]
    spans.sort(key=lambda s: (s.start, s.rank, s.end))
    memory = peak_memory(slots, table, checkpoint, weight_copies)
    return Simulation(schedule, time, idle, tuple(map(int, memory)), tuple(spans))


def end_times(
    slots: SlotTable, table: StageTable, links: Vector, recompute: bool = False, limit: float = np.inf
) -> Vector:
    """The end time of each slot; `links[i]` is the seconds from stage i to the next, and back.

    Each iteration takes all slots that can run next, at most one per rank, as arrays. If the step must take
    `limit` seconds or more, the simulation stops early and returns infinite times.
    """
    count, m = slots.count, int(slots.microbatches.max()) + 1
    stages, micro = slots.stages, slots.microbatches
    # `done` has a row of end times for each stage, forward and then backward, between two rows of zeros for
    # the inputs that exist from the start. A rank's own results need no entry: its slots are in order.
    done = np.full(2 * (count + 2) * m + 1, np.inf)
    done[:m] = 0.0
    done[-1 - m : -1] = 0.0
    forward, weight = slots.actions == FORWARD, slots.actions == WEIGHT
    need = np.where(forward, stages * m, (count + 2 + stages + 2) * m) + micro
    give = np.where(forward, (stages + 1) * m, (count + 2 + stages + 1) * m) + micro
    need[weight], give[weight] = 0, len(done) - 1
    wires = np.concatenate([[0.0], links, [0.0]])
    wait = np.where(forward, wires[stages], wires[stages + 1])
    wait[weight] = 0.0
    seconds = table.passes(recompute)[slots.actions, stages]
    ended = np.empty(len(stages))
    place, stop = slots.begins[:-1].copy(), slots.begins[1:]
    rest = np.add.reduceat(np.append(seconds, 0.0), place) if np.isfinite(limit) else np.zeros(len(place))
    clock = np.zeros(len(place))
    live = np.flatnonzero(place < stop)
    iteration = 0
    while len(live):
        at = place[live]
        ready = done[need[at]] + wait[at]
        can = ready < np.inf
        if not can.any():
            stuck = [str(Slot(int(stages[i]), Action(slots.actions[i]), int(micro[i]))) for i in at]
            raise PartitionError(f"the schedule deadlocks: the ranks cannot run {', '.join(stuck)}")
        going, at = live[can], at[can]
        spent = seconds[at]
        end = np.maximum(clock[going], ready[can]) + spent
        clock[going] = done[give[at]] = ended[at] = end
        rest[going] -= spent
        place[going] += 1
        live = live[place[live] < stop[live]]
        iteration += 1
        if iteration % 64 == 0 and float((clock + rest).max()) * (1 - 1e-9) >= limit:
            return np.full(len(stages), np.inf)
    return ended


def peak_memory(slots: SlotTable, table: StageTable, recompute: bool, weight_copies: int) -> Vector:
    """The most bytes that each stage holds at once.

    Activations are held from the start of a forward pass to the end of its last gradient.
    """
    held, held_back = slots.held
    base = table.weights * weight_copies
    if not recompute:
        return np.asarray(base + table.saved * held)
    entering = np.concatenate([[0.0], table.borders])
    return np.asarray(base + np.maximum(entering * held, entering * held_back + table.saved))


def _check(
    schedule: Schedule, costs: Sequence[Cost], links: Sequence[float] | None, borders: Sequence[int] | None
) -> None:
    if len(costs) != schedule.stages:
        raise PartitionError(f"{len(costs)} costs for {schedule.stages} stages")
    for name, value in (("links", links), ("borders", borders)):
        if value is not None and len(value) != schedule.stages - 1:
            raise PartitionError(f"{len(value)} {name} for {schedule.stages - 1} borders")


_COLOURS = {
    Action.FORWARD: "#4c8bb8",
    Action.BACKWARD: "#d98243",
    Action.INPUT: "#d98243",
    Action.WEIGHT: "#6aa564",
}
_WORDS = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.INPUT: "input grad",
    Action.WEIGHT: "weight grad",
}
_UNIT = Cost(forward=1.0, backward_input=1.0, backward_weight=1.0)


def _simulated(subject: Schedule | Simulation) -> Simulation:
    return subject if isinstance(subject, Simulation) else simulate(subject, [_UNIT] * subject.stages)


def ascii_gantt(subject: Schedule | Simulation, width: int | None = None) -> str:
    """A text chart: one line per rank, time runs right. In a bare schedule, forward takes 1 and backward 2.

    >>> from intarsia.pipeline.schedules import schedule
    >>> print(ascii_gantt(schedule("1F1B", 2, 2)))
    rank 0 |F0|F1|  |  |B0   |  |B1   |
    rank 1 |  |F0|B0   |F1|B1   |  |  |
    bubble 33%
    """
    simulation = _simulated(subject)
    cells = width if width is not None else round(simulation.step_time)
    scale = cells / simulation.step_time if simulation.step_time else 1.0
    name_stage = len(simulation.schedule.ranks) != simulation.schedule.stages
    size = max(len(_label(s.slot, name_stage)) for s in simulation.timeline)
    lines = []
    for rank in range(len(simulation.schedule.ranks)):
        row, at = "", 0
        for span in simulation.timeline:
            if span.rank != rank:
                continue
            start, end = round(span.start * scale), round(span.end * scale)
            row += "".join("|" + " " * size for _ in range(start - at))
            text = _label(span.slot, name_stage)
            length = max(end - start, 1) * (size + 1) - 1
            row += "|" + text[:length].ljust(length)
            at = max(end, start + 1)
        row += "".join("|" + " " * size for _ in range(cells - at))
        lines.append(f"rank {rank} {row}|")
    return "\n".join([*lines, f"bubble {simulation.bubble:.0%}"])


def save_gantt(subject: Schedule | Simulation, path: str | os.PathLike[str]) -> None:
    """Write the chart as a picture: .svg, .png or .pdf, with matplotlib (`intarsia[charts]`)."""
    simulation = _simulated(subject)
    ranks, stages = len(simulation.schedule.ranks), simulation.schedule.stages
    width = 14
    figure = new_figure(width, 1.3 + 0.4 * ranks)
    axes = figure.subplots()
    for span in simulation.timeline:
        length, text = span.end - span.start, _label(span.slot, ranks != stages)
        shade = 1.0 - 0.35 * (span.slot.stage // ranks) / max(1, stages // ranks)
        colour = _COLOURS[span.slot.action], shade
        axes.barh(span.rank, length, left=span.start, height=0.86, color=colour, edgecolor="white")
        # The text is drawn if it fits: the box has about 65 points per inch, a character 4.5 points.
        if length * 65 * width > 4.5 * len(text) * simulation.step_time:
            middle = span.start + length / 2
            axes.text(middle, span.rank, text, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set(title=_title(simulation), xlim=(0, simulation.step_time), facecolor="#eeeeee")
    axes.invert_yaxis()
    used = [action for action in Action if any(span.slot.action is action for span in simulation.timeline)]
    for action in used:
        axes.bar(0, 0, color=_COLOURS[action], label=f"{action} {_WORDS[action]}")
    figure.legend(loc="outside lower left", ncols=len(used), frameon=False)
    save_figure(figure, Path(path))


def _title(simulation: Simulation) -> str:
    s = simulation.schedule
    return (
        f"{s.name}: {s.stages} stages on {len(s.ranks)} ranks, {s.microbatches} micro-batches,"
        f" step {simulation.step_time:.4g}, bubble {simulation.bubble:.0%}"
    )


def _label(slot: Slot, name_stage: bool) -> str:
    return str(slot) if name_stage else f"{slot.action}{slot.microbatch}"
