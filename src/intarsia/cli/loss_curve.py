"""A curve of losses, as text for a terminal and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from intarsia.drawing.chart import new_figure, save_figure


def text_curve(losses: Sequence[float], width: int = 60, height: int = 10) -> str:
    """The losses as a curve of characters; several steps share a column if there are many.

    >>> print(text_curve([3.0, 2.0, 1.0], width=3, height=3))
    3.000 |*
          | *
    1.000 |  *
    """
    points = _columns([x for x in losses if math.isfinite(x)], width)
    if not points:
        return "no losses"
    low, high = min(points), max(points)
    scale = (height - 1) / (high - low) if high > low else 0.0
    rows = [round((high - p) * scale) for p in points]
    ends = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    margin = max(map(len, ends.values()))
    lines = []
    for y in range(height):
        marks = "".join("*" if r == y else " " for r in rows).rstrip()
        lines.append(f"{ends.get(y, ''):>{margin}} |{marks}")
    return "\n".join(lines)


def save_curve(losses: Sequence[float], path: Path) -> None:
    """Write the losses as a picture, the steps from left to right."""
    figure = new_figure(7, 3.5)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#1565c0")
    axes.set(title=f"loss over {len(losses)} steps", xlabel="step", ylabel="loss")
    axes.grid(color="#dddddd")
    save_figure(figure, path)


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    bounds = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
