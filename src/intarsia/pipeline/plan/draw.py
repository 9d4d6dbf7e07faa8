"""Pictures of schedules: text for a terminal, SVG and HTML for a page."""

from __future__ import annotations

from html import escape

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
    """A line a rank, time running right; a bare schedule is drawn with equal passes, backward being two.

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
            room = max(end - start, 1) * (size + 1) - 1
            row += "|" + text[:room].ljust(room)
            at = max(end, start + 1)
        row += "".join("|" + " " * size for _ in range(cells - at))
        lines.append(f"rank {rank} {row}|")
    return "\n".join([*lines, f"bubble {simulation.bubble:.0%}"])


def svg_gantt(subject: Schedule | Simulation, width: int = 960, row: int = 30) -> str:
    """The same as an SVG picture, with a legend and, on hover, what each box is."""
    simulation = _simulated(subject)
    left, top = 60, 26
    ranks = len(simulation.schedule.ranks)
    scale = (width - left - 10) / simulation.step_time if simulation.step_time else 1.0
    name_stage = ranks != simulation.schedule.stages
    height = top + ranks * row + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="16" font-size="13">{escape(_title(simulation))}</text>',
    ]
    for rank in range(ranks):
        y = top + rank * row
        parts.append(f'<text x="8" y="{y + row * 0.62:.1f}">rank {rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width - left - 10}" height="{row - 4}" fill="#eeeeee"/>'
        )
    for span in simulation.timeline:
        x, y = left + span.start * scale, top + span.rank * row
        wide = max((span.end - span.start) * scale, 0.5)
        text = _label(span.slot, name_stage)
        shade = 1.0 - 0.35 * (span.slot.stage // ranks) / max(1, simulation.schedule.stages // ranks)
        tooltip = f"stage {span.slot.stage}, {_WORDS[span.slot.action]}, micro-batch {span.slot.microbatch}"
        parts += [
            f"<g><title>{tooltip}: {span.start:.4g} to {span.end:.4g}</title>",
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{row - 4}" stroke="#ffffff"'
            f' fill="{_COLOURS[span.slot.action]}" fill-opacity="{shade:.2f}"/>',
        ]
        if wide > 7 * len(text):
            parts.append(
                f'<text x="{x + wide / 2:.2f}" y="{y + row * 0.58:.1f}" text-anchor="middle"'
                f' fill="#ffffff">{text}</text>'
            )
        parts.append("</g>")
    x = left
    for action in (a for a in Action if any(s.slot.action is a for s in simulation.timeline)):
        parts.append(f'<rect x="{x}" y="{height - 20}" width="12" height="12" fill="{_COLOURS[action]}"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 10}">{action} {_WORDS[action]}</text>')
        x += 110
    return "\n".join([*parts, "</svg>\n"])


def html_gantt(*pictures: Schedule | Simulation) -> str:
    """One page with a picture for each."""
    body = "\n".join(f"<p>{svg_gantt(p)}</p>" for p in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Schedules</title>\n{body}\n</html>\n'
    )


def _title(simulation: Simulation) -> str:
    s = simulation.schedule
    return (
        f"{s.name}: {s.stages} stages on {len(s.ranks)} ranks, {s.microbatches} micro-batches,"
        f" step {simulation.step_time:.4g}, bubble {simulation.bubble:.0%}"
    )


def _label(slot: Slot, name_stage: bool) -> str:
    return str(slot) if name_stage else f"{slot.action}{slot.microbatch}"
