"""A curve of losses, as text for a terminal and as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


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


def svg_curve(losses: Sequence[float], title: str = "loss", width: int = 640, height: int = 320) -> str:
    """The losses as a picture, the steps from left to right.

    >>> svg_curve([2.0, 1.0]).startswith("<svg")
    True
    """
    points = [(i, x) for i, x in enumerate(losses) if math.isfinite(x)]
    low = min((x for _, x in points), default=0.0)
    high = max((x for _, x in points), default=1.0)
    span, last, edge = (high - low) or 1.0, max(1, len(losses) - 1), 48
    inner = (width - 2 * edge, height - 2 * edge)
    path = " ".join(
        f"{edge + i / last * inner[0]:.1f},{edge + (high - x) / span * inner[1]:.1f}" for i, x in points
    )
    bottom = height - edge
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<polyline points="{edge},{edge} {edge},{bottom} {width - edge},{bottom}"'
        ' fill="none" stroke="#888"/>'
        f'<text x="{edge}" y="{edge - 16}">{_escaped(title)}</text>'
        f'<text x="4" y="{edge + 4}">{high:.3f}</text><text x="4" y="{bottom}">{low:.3f}</text>'
        f'<text x="{width - edge}" y="{bottom + 18}" text-anchor="end">step {len(losses)}</text>'
        f'<polyline points="{path}" fill="none" stroke="#1565c0" stroke-width="1.5"/></svg>\n'
    )


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    bounds = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
