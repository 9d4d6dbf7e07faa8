"""Pictures of plans (a page for the browser, SVG for documents, JSON for Model Explorer), and charts.

This package imports neither torch nor plans: `graph/plan_text.py` turns a plan into a `Drawing`.
"""

from __future__ import annotations

import html
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia.errors import InputError, count_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The colours of engines, in the order of their first segments: Okabe and Ito's, for colour-blind readers.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00")
PYTORCH_COLOUR = "#8a8f98"


@dataclass(frozen=True)
class DrawnNode:
    """One node. `inputs` are positions in the list of nodes. An input of the model has no engine."""

    name: str
    op: str
    module: str = ""
    source: str = ""
    shape: str = ""
    engine: str = ""
    segment: int = -1
    inputs: tuple[int, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    work: float = 1.0  # an estimate, in the same unit for all nodes


@dataclass(frozen=True)
class DrawnLayers:
    """The layers of a segment's network, before and after rewriting, and the rewrites between."""

    converted: str
    rewritten: str
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawnSegment:
    """One segment: its engine, its inputs and outputs, and its layers."""

    engine: str
    nodes: int
    operators: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    alone: bool = False
    seconds: float | None = None  # of a call, if measured
    layers: DrawnLayers | None = None  # if the engine reads layer networks


@dataclass(frozen=True)
class DrawnTrial:
    """One measured plan."""

    name: str
    seconds: float
    spread: float
    segments: int
    chosen: bool
    last_race: bool  # whether it was in the last race, whose plans are compared round by round


@dataclass(frozen=True)
class Drawing:
    """The content of a picture."""

    heading: str
    nodes: tuple[DrawnNode, ...]
    segments: tuple[DrawnSegment, ...]
    engine_seconds: Mapping[str, float] = field(default_factory=dict)  # measured seconds of a call
    timed_how: str = ""
    trials: tuple[DrawnTrial, ...] = ()
    measured_how: str = ""
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bodies: Mapping[str, Drawing] = field(default_factory=dict)  # bodies of control flow, by node and name

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines in use, in the order they first run."""
        return tuple(dict.fromkeys(segment.engine for segment in self.segments))

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each engine; PyTorch's is grey in every picture."""
        others = [engine for engine in self.engines if engine != "pytorch"]
        named = {engine: COLOURS[number % len(COLOURS)] for number, engine in enumerate(others)}
        return {engine: named.get(engine, PYTORCH_COLOUR) for engine in self.engines}


# Charts by matplotlib, which is imported only for a chart.


_FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Raise InputError if no chart can be written to this file."""
    if path.suffix not in _FORMATS:
        raise InputError(f"{path} is not a picture; give a name that ends in {', '.join(_FORMATS)}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'intarsia[charts]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure. Equal figures result in equal files; in SVG, text stays text."""
    import matplotlib

    check_picture(path)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "intarsia"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def text_curve(losses: Sequence[float], width: int = 60, height: int = 10) -> str:
    """The losses as a chart of characters; several steps share a column if there are many.

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
    """Write a chart of the losses as a picture."""
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


# Pictures of a plan: one HTML page, SVG for documents, and JSON for Google's Model Explorer.
#
# The page needs no server, no network and no other file. The JSON has the format of
# `ai-edge-model-explorer-adapter` 0.1: graphs of nodes, each with its incoming edges.


class Pictured(ABC):
    """The base class of objects with pictures."""

    @abstractmethod
    def drawing(self) -> Drawing:
        """The content of the pictures, as plain data."""

    def to_html(self) -> str:
        """One self-contained HTML page: the graph, its layers, every fallback, and advice."""
        return page(self.drawing())

    def to_svg(self) -> str:
        """The segments as SVG, in the order they run."""
        return svg(self.drawing())

    def to_model_explorer(self) -> str:
        """The graphs as JSON for Google's Model Explorer: `model-explorer FILE` opens it."""
        return model_explorer(self.drawing())

    def _repr_html_(self) -> str:
        return framed(self.to_html())


def page(drawing: Drawing, title: str = "Intarsia report") -> str:
    """The HTML page of a drawing. Names, source lines and reasons are data in it, never markup.

    >>> from intarsia.drawing import Drawing, DrawnNode, DrawnSegment
    >>> drawing = Drawing("<b>", (DrawnNode("</script>", "op"),), (DrawnSegment("pytorch", 1, "op"),))
    >>> "<b>" in page(drawing), "</script>\\"" in page(drawing)
    (False, False)
    """
    return _text("page.html").format(
        title=html.escape(title),
        style=_text("page.css"),
        layout=_text("vendor/dagre-3.1.3.min.js"),
        content=_data(_content(drawing)),
        script=_text("page.js"),
    )


def framed(document: str, height: int = 720) -> str:
    """The page in an iframe, for a notebook, so that their styles and scripts do not interfere."""
    source = html.escape(document, quote=True)
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{source}"'
        f' style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _content(drawing: Drawing) -> dict[str, Any]:
    plain = asdict(drawing) | {"colours": drawing.colours}
    return plain | {"bodies": {name: _content(body) for name, body in drawing.bodies.items()}}


def _data(content: dict[str, Any]) -> str:
    # A script element ends at any `</script`, also in a string, so the text must not contain `<`.
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _text(name: str) -> str:
    return files("intarsia.drawing").joinpath(name).read_text(encoding="utf-8")


_WIDTH, _ROW, _GAP, _MOST = 720, 46, 26, 40


def svg(drawing: Drawing) -> str:
    """The SVG picture. Of more than 40 segments, it shows the first and the last 20."""
    count = len(drawing.segments)
    shown: list[int | None] = list(range(count))
    if count > _MOST:
        shown = [*range(_MOST // 2), None, *range(count - _MOST // 2, count)]
    height = 44 + len(shown) * (_ROW + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-weight="600" fill="#1c2128">{html.escape(drawing.heading)}</text>',
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
    count = f"{count_text(segment.nodes, 'node')}{time}"
    operators = segment.operators if len(segment.operators) <= 96 else segment.operators[:95] + "…"
    name = f'<tspan font-weight="600">{number}  {html.escape(segment.engine)}</tspan>'
    yield f'<rect {box} width="{_WIDTH - 24}" rx="6" fill="#f6f7f9" stroke="{colour}"/>'
    yield f'<rect {box} width="8" rx="3" fill="{colour}"/>'
    yield f'<text x="30" y="{top + 19}" fill="#1c2128">{name}  {html.escape(count)}</text>'
    yield f'<text x="30" y="{top + 37}" font-size="11" fill="#5d6672">{html.escape(operators)}</text>'


def _arrow(size: int, top: int) -> Iterator[str]:
    middle = _WIDTH // 2
    yield f'<path d="M{middle},{top}V{top + _GAP - 5}" stroke="#5d6672"/>'
    yield f'<path d="M{middle - 4},{top + _GAP - 7}h8l-4,7z" fill="#5d6672"/>'
    yield f'<text x="{middle + 10}" y="{top + 17}" font-size="11" fill="#5d6672">{bytes_text(size)}</text>'


def bytes_text(count: int) -> str:
    """A number of bytes as text, in a unit of its size.

    >>> bytes_text(512), bytes_text(1536)
    ('512 B', '1.5 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def model_explorer(drawing: Drawing, name: str = "intarsia") -> str:
    """The JSON for Model Explorer. Bodies of control flow are separate graphs."""
    drawings = {name: drawing, **{f"{name}/{body}": inner for body, inner in drawing.bodies.items()}}
    graphs = [
        {"id": key, "nodes": [_explorer_node(number, node, each) for number, node in enumerate(each.nodes)]}
        for key, each in drawings.items()
    ]
    return json.dumps({"label": name, "graphs": graphs}, indent=1)


def _explorer_node(number: int, node: DrawnNode, drawing: Drawing) -> dict[str, Any]:
    segment = "" if node.segment < 0 else str(node.segment)
    attributes = {
        "name": node.name,
        "engine": node.engine,
        "segment": segment,
        "source": node.source,
        **{f"not on {engine}": reason for engine, reason in node.reasons.items()},
    }
    drawn: dict[str, Any] = {
        "id": str(number),
        "label": node.op,
        "namespace": node.module.replace(".", "/"),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": str(read), "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, read in enumerate(node.inputs)
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": node.shape}]}],
    }
    if node.engine:
        drawn["style"] = {"backgroundColor": drawing.colours[node.engine]}
    return drawn
