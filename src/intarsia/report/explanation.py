"""The explanation of a plan: data, text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from intarsia.drawing import Drawing, framed, model_explorer, page, svg
from intarsia.drawing.svg import bytes_text
from intarsia.graph.plan import Plan
from intarsia.graph.plan_text import SegmentShapes
from intarsia.partition.advice import Advice

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class NodeReport:
    """One node: what it is, where it comes from, who runs it, and why not another."""

    name: str
    op: str
    module: str
    source: str
    segment: int
    engine: str
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class SegmentReport:
    """One segment: who runs it, how many nodes, and what crosses its border."""

    number: int
    engine: str
    nodes: int
    do_not_merge: bool
    shapes: SegmentShapes


@dataclass(frozen=True, eq=False)
class Explanation:
    """What would run where, and why. Print it, or take `to_json()` or `to_html()`.

    Example:
        >>> import torch, intarsia
        >>> explanation = intarsia.explain(torch.nn.ReLU(), (torch.ones(2),), engines="pytorch")
        >>> [node.op for node in explanation.nodes if node.engine == "pytorch"]
        ['aten.relu.default']
    """

    plan: Plan
    segments: tuple[SegmentReport, ...]
    nodes: tuple[NodeReport, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    bodies: Mapping[str, Explanation] = field(default_factory=dict)  # of control flow, by node and name

    def to_json(self, indent: int | None = 2) -> str:
        """Everything, as JSON with the keys in a fixed order."""
        return json.dumps(self._content(), indent=indent)

    def _content(self) -> dict[str, Any]:
        return {
            "strategy": self.plan.strategy,
            "on_engines": round(self.plan.on_engines, 4),
            "segments": [asdict(segment) for segment in self.segments],
            "nodes": [asdict(node) for node in self.nodes],
            "advice": [asdict(advice) | {"text": str(advice)} for advice in self.advice],
            "notes": list(self.notes),
            "bodies": {name: body._content() for name, body in self.bodies.items()},
        }

    def drawing(self) -> Drawing:
        """What pictures show, as plain data; bodies of control flow are drawings of their own."""
        inner = {name: body.drawing() for name, body in self.bodies.items()}
        return replace(self.plan.drawing(), notes=self.notes, bodies=inner)

    def to_html(self) -> str:
        """One HTML page that needs nothing else: the graph, its layers, every fallback, what would help."""
        return page(self.drawing())

    def to_svg(self) -> str:
        """The segments in the order they would run as SVG, for documents."""
        return svg(self.drawing())

    def to_model_explorer(self) -> str:
        """The graphs as JSON for Google's Model Explorer: `model-explorer FILE` opens it."""
        return model_explorer(self.drawing())

    def _repr_html_(self) -> str:
        return framed(self.to_html())

    def __str__(self) -> str:
        lines = [str(self.plan), "borders:"]
        for segment in self.segments:
            shapes = segment.shapes
            lines.append(
                f"  {segment.number:>3}  in {bytes_text(shapes.bytes_in)}, "
                f"out {bytes_text(shapes.bytes_out)}: ({_list(shapes.inputs)}) -> ({_list(shapes.outputs)})"
            )
        lines.extend(f"advice: {advice}" for advice in self.advice)
        lines.extend(f"note: {note}" for note in self.notes)
        for name, body in self.bodies.items():
            lines += [f"body {name}:", *(f"  {line}" for line in str(body).splitlines())]
        return "\n".join(lines)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        borders = Table(title="borders", title_justify="left")
        for column in ("segment", "engine", "bytes in", "bytes out", "inputs", "outputs"):
            borders.add_column(column)
        for segment in self.segments:
            shapes = segment.shapes
            cells = (
                bytes_text(shapes.bytes_in),
                bytes_text(shapes.bytes_out),
                _list(shapes.inputs),
                _list(shapes.outputs),
            )
            borders.add_row(str(segment.number), segment.engine, *map(Text, cells))
        refused = Table(title="nodes not on their first engine", title_justify="left")
        for column in ("node", "op", "module", "source", "engine", "reason"):
            refused.add_column(column)
        for node in self.nodes:
            if node.reasons:
                why = "; ".join(f"{engine}: {reason}" for engine, reason in node.reasons.items())
                row = (node.name, node.op, node.module, node.source, node.engine, why)
                refused.add_row(*map(Text, row))
        told = [Text(f"advice: {advice}") for advice in self.advice]
        told += [Text(f"note: {note}") for note in self.notes]
        inner = [part for name, body in self.bodies.items() for part in (Text(f"body {name}"), body)]
        return Group(self.plan.__rich__(), borders, *([refused] if refused.row_count else []), *told, *inner)


def _list(values: tuple[object, ...], most: int = 6) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown + (f", {len(values) - most} more" if len(values) > most else "")
