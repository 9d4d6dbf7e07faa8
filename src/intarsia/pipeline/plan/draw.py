"""Charts of schedules: text for a terminal, pictures for documents."""

from __future__ import annotations

import os
from pathlib import Path

from intarsia.drawing.drawing import new_figure, save_figure
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.simulate import Simulation, simulate
from intarsia.pipeline.schedules import Action, Schedule, Slot

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
