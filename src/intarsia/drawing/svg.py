"""A plan as SVG, for documents: its segments in the order they run, and what crosses between them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from intarsia.drawing.drawing import Drawing, DrawnSegment

_WIDTH, _ROW, _GAP, _MOST = 720, 46, 26, 40


def svg(drawing: Drawing) -> str:
    """The picture; of a plan with more than 40 segments the first and the last 20."""
    count = len(drawing.segments)
    shown: list[int | None] = list(range(count))
    if count > _MOST:
        shown = [*range(_MOST // 2), None, *range(count - _MOST // 2, count)]
    height = 44 + len(shown) * (_ROW + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="600" fill="#1c2128">{escape(drawing.heading)}</text>',
    ]
    for place, number in enumerate(shown):
        top = 40 + place * (_ROW + _GAP)
        if number is None:
            lines.append(f'<text x="12" y="{top + 28}" fill="#5d6672">{count - _MOST} more segments</text>')
            continue
        lines += _segment(number, drawing.segments[number], drawing.colours, top)
        if place + 1 < len(shown):
            lines += _arrow(drawing.segments[number].bytes_out, top + _ROW)
    return "\n".join([*lines, "</svg>", ""])


def _segment(number: int, segment: DrawnSegment, colours: dict[str, str], top: int) -> Iterator[str]:
    colour, box = colours[segment.engine], f'x="12" y="{top}" height="{_ROW}"'
    time = "" if segment.seconds is None else f", {segment.seconds * 1e3:.3g} ms"
    count = f"{segment.nodes} node{'s' * (segment.nodes != 1)}{time}"
    operators = segment.operators if len(segment.operators) <= 96 else segment.operators[:95] + "…"
    name = f'<tspan font-weight="600">{number}  {escape(segment.engine)}</tspan>'
    yield f'<rect {box} width="{_WIDTH - 24}" rx="6" fill="#f6f7f9" stroke="{colour}"/>'
    yield f'<rect {box} width="8" rx="3" fill="{colour}"/>'
    yield f'<text x="30" y="{top + 19}" fill="#1c2128">{name}  {escape(count)}</text>'
    yield f'<text x="30" y="{top + 37}" font-size="11" fill="#5d6672">{escape(operators)}</text>'


def _arrow(size: int, top: int) -> Iterator[str]:
    middle = _WIDTH // 2
    yield f'<path d="M{middle},{top}V{top + _GAP - 5}" stroke="#5d6672"/>'
    yield f'<path d="M{middle - 4},{top + _GAP - 7}h8l-4,7z" fill="#5d6672"/>'
    yield f'<text x="{middle + 10}" y="{top + 17}" font-size="11" fill="#5d6672">{bytes_text(size)}</text>'


def bytes_text(count: int) -> str:
    """A number of bytes, in the unit that suits it.

    >>> bytes_text(512), bytes_text(1536)
    ('512 B', '1.5 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
