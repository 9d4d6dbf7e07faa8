"""Plans as text and as drawings, and the shapes at the borders of segments."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from intarsia.drawing import Drawing, DrawnLayers, DrawnNode, DrawnSegment
from intarsia.errors import count_text
from intarsia.graph.border import Border, borders
from intarsia.graph.nodes import module_path, op_name, source_line
from intarsia.graph.segment import PYTORCH, Segment
from intarsia.graph.sizes import Range, bytes_of, size_range, total_bytes
from intarsia.quantized import bits_of, is_integer_product
from intarsia.tracing import Profile, segment_name

if TYPE_CHECKING:
    from rich.table import Table


Segments = Sequence[Segment]
Bodies = Mapping[str, Sequence[Segment]]  # the segments of each body of control flow, by the body's name

_OPS_SHOWN = 6


def plan_text(segments: Segments, strategy: str, bodies: Bodies) -> str:
    """The plan as lines: a heading, each segment and body, and the reasons of every fallback."""
    width = max((len(segment.engine) for segment in segments), default=0)
    lines = [heading(segments, strategy, bodies)]
    for number, segment in enumerate(segments):
        alone = "  (stands alone)" if segment.do_not_merge else ""
        count = count_text(len(segment), "node")
        lines.append(
            f"  {number:>3}  {segment.engine:<{width}}  {count:<10} {ops_text(segment.nodes)}{alone}"
        )
    lines += [f"  {row}" for row in _body_rows(bodies)]
    lines += _packed_rows(segments)
    for engine, rows in fallbacks(segments).items():
        lines.append(f"not on {engine}:")
        lines.extend(f"  {row}" for row in rows)
    return "\n".join(lines)


def _packed_rows(segments: Segments) -> list[str]:
    """The number of packed weights by engine and bits, and of products of activations in 8 bits."""
    counts: dict[str, Counter[int]] = {}
    products = Counter[str]()
    for segment in segments:
        count = sum(map(is_integer_product, segment.nodes))
        if count:
            products[segment.engine] += count
        bits = [number for node in segment.nodes if (number := bits_of(node)) is not None]
        if bits:
            counts.setdefault(segment.engine, Counter()).update(bits)
    return [
        f"weights in few bits on {engine}: "
        + ", ".join(f"{count} in {number} bits" for number, count in sorted(each.items()))
        for engine, each in counts.items()
    ] + [
        f"activations and weights in 8 bits on {engine}: {count_text(count, 'product')}"
        for engine, count in products.items()
    ]


def plan_table(segments: Segments, strategy: str, bodies: Bodies) -> Table:
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=heading(segments, strategy, bodies), title_justify="left")
    for column in ("segment", "engine", "nodes", "ops", "not on an engine because"):
        table.add_column(column)
    for number, segment in enumerate(segments):
        reasons = Counter(
            f"{engine}: {reason}" for why in segment.reasons.values() for engine, reason in why.items()
        )
        text = "\n".join(reason for reason, _ in reasons.most_common(_OPS_SHOWN))
        table.add_row(str(number), segment.engine, str(len(segment)), ops_text(segment.nodes), text)
    return table


def ops_text(nodes: tuple[fx.Node, ...]) -> str:
    """The ops of some nodes with their counts, most frequent first."""
    counts = Counter(op_name(node) for node in nodes)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} x{count}" if count > 1 else name for name, count in ranked[:_OPS_SHOWN]]
    more = len(ranked) - len(shown)
    return ", ".join(shown) + (f", {more} more kinds" if more > 1 else f", {more} more kind" if more else "")


def fallbacks(segments: Segments) -> dict[str, list[str]]:
    """For every engine, a line for each operator and reason of a refusal: the number, and an example."""
    seen: dict[str, dict[tuple[str, str], list[fx.Node]]] = {}
    for segment in segments:
        for node, reasons in segment.reasons.items():
            for engine, reason in reasons.items():
                seen.setdefault(engine, {}).setdefault((op_name(node), reason), []).append(node)
    lines: dict[str, list[str]] = {}
    for engine in sorted(seen):
        ranked = sorted(seen[engine].items(), key=lambda item: (-len(item[1]), item[0]))
        lines[engine] = [_fallback(name, reason, nodes) for (name, reason), nodes in ranked]
    return lines


def _fallback(name: str, reason: str, nodes: list[fx.Node]) -> str:
    times = f" x{len(nodes)}" if len(nodes) > 1 else ""
    place = [text for text in (module_path(nodes[0]), source_line(nodes[0])) if text]
    example = f" [{', '.join((nodes[0].name, *place))}]"
    return f"{name}{times}: {reason}{example}"


def _body_rows(bodies: Bodies) -> list[str]:
    """A line for each body of control flow: how many of its nodes run on which engine."""
    rows = []
    for name, segments in bodies.items():
        counts: Counter[str] = Counter()
        for segment in segments:
            counts[segment.engine] += len(segment)
        placed = ", ".join(f"{count_text(count, 'node')} on {engine}" for engine, count in counts.items())
        rows.append(f"in {name}: {placed or 'nothing to run'}")
    return rows


def node_counts(segments: Segments, bodies: Bodies) -> tuple[int, int]:
    """The number of nodes on engines and the number of all nodes, including those in bodies."""
    everywhere = [*segments, *(segment for body in bodies.values() for segment in body)]
    placed = sum(len(segment) for segment in everywhere if segment.engine != PYTORCH)
    return placed, sum(map(len, everywhere))


def heading(segments: Segments, strategy: str, bodies: Bodies) -> str:
    """The number of segments, and the share of nodes on engines."""
    placed, total = node_counts(segments, bodies)
    how = f" by {strategy}" if strategy else ""
    count = count_text(len(segments), "segment")
    share = f"{placed} of {total} nodes ({placed / total:.0%}) on engines" if total else "nothing to run"
    return f"Plan{how}: {count}, {share}"


@dataclass(frozen=True)
class PlanDetails:
    """The details of a drawing that a plan does not hold, since converters and engines compute them."""

    advice: tuple[str, ...] = ()
    layers: Mapping[int, DrawnLayers] = field(default_factory=dict)  # by the segment's number
    work: Mapping[fx.Node, float] = field(default_factory=dict)  # estimated


DetailsSource = Callable[[Sequence[Segment]], PlanDetails]


def plan_drawing(segments: Sequence[Segment], title: str, details: PlanDetails) -> Drawing:
    """The drawing of these segments."""
    homes = {node: number for number, segment in enumerate(segments) for node in segment.nodes}
    graph = next(iter(homes)).graph if homes else fx.Graph()
    shown = [node for node in graph.nodes if node in homes or node.op == "placeholder"]
    places = {node: place for place, node in enumerate(shown)}
    sources = _sources(graph, places)
    nodes = tuple(_node(node, homes.get(node), segments, sources[node], details) for node in shown)
    shapes = segment_shapes(borders(graph, segments))
    drawn = tuple(
        DrawnSegment(
            engine=segment.engine,
            nodes=len(segment),
            operators=ops_text(segment.nodes),
            inputs=tuple(map(str, shape.inputs)),
            outputs=tuple(map(str, shape.outputs)),
            bytes_in=shape.bytes_in,
            bytes_out=shape.bytes_out,
            alone=segment.do_not_merge,
            layers=details.layers.get(number),
        )
        for number, (segment, shape) in enumerate(zip(segments, shapes[: len(segments)], strict=True))
    )
    return Drawing(title, nodes, drawn, advice=details.advice)


def _node(
    node: fx.Node,
    number: int | None,
    segments: Sequence[Segment],
    inputs: tuple[int, ...],
    details: PlanDetails,
) -> DrawnNode:
    shape = value_shape(node)
    text = f"{shape.dtype}[{', '.join(map(str, shape.sizes))}]"
    if number is None:
        return DrawnNode(node.name, "input", shape=text)
    segment = segments[number]
    return DrawnNode(
        name=node.name,
        op=op_name(node),
        module=module_path(node),
        source=source_line(node, full=True),
        shape=text,
        engine=segment.engine,
        segment=number,
        inputs=inputs,
        reasons=dict(segment.reasons.get(node, {})),
        work=details.work.get(node, 1.0),
    )


def _sources(graph: fx.Graph, places: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    """For each node, the drawn nodes that it reads, directly or through others."""
    sources: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        read: dict[int, None] = {}
        for value in node.all_input_nodes:
            read.update(dict.fromkeys([places[value]] if value in places else sources[value]))
        sources[node] = tuple(read)
    return sources


def profiled(drawing: Drawing, profile: Profile) -> Drawing:
    """The drawing with the median time of each segment."""
    times = profile.segments
    segments, by_engine = [], dict[str, float]()
    for number, segment in enumerate(drawing.segments):
        calls = times.get(segment_name(number, segment.engine))
        seconds = statistics.median(calls) if calls else None
        segments.append(replace(segment, seconds=seconds))
        if seconds is not None:
            by_engine[segment.engine] = by_engine.get(segment.engine, 0.0) + seconds
    count = max(map(len, times.values()), default=0)
    how = f"Medians of {count} calls that were profiled."
    return replace(drawing, segments=tuple(segments), engine_seconds=by_engine, timed_how=how)


# The shapes of the inputs and outputs of segments, with the ranges of symbolic sizes.


@dataclass(frozen=True)
class ValueShape:
    """A value that crosses a border: its name, element type, sizes (numbers or expressions) and their ranges.

    `ranges` has one entry for every expression in `sizes`. A scalar has no sizes.
    """

    name: str
    dtype: str
    sizes: tuple[int | str, ...]
    ranges: Mapping[str, Range]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True)
class SegmentShapes:
    """The shapes of a segment's inputs and outputs, and the bytes that cross.

    Inputs of the graph do not count as crossing.
    """

    inputs: tuple[ValueShape, ...]
    outputs: tuple[ValueShape, ...]
    bytes_in: int
    bytes_out: int


def segment_shapes(edges: Sequence[Border]) -> list[SegmentShapes]:
    """The shapes at every border, from the graph's fake tensors.

    Example:
        >>> import intarsia
        >>> fast = intarsia.compile(torch.nn.ReLU(), (torch.ones(2, 3),), engines="pytorch")
        >>> graph = fast.plan.nodes[0].graph
        >>> from intarsia.graph.border import borders
        >>> print(segment_shapes(borders(graph, fast.plan.segments))[0].inputs[0])
        input_1: float32[2, 3]
    """
    return [
        SegmentShapes(
            tuple(value_shape(node) for node in border.inputs),
            tuple(value_shape(node) for node in border.outputs),
            total_bytes(node for node in border.inputs if node.op != "placeholder"),
            total_bytes(border.outputs),
        )
        for border in edges
    ]


def value_shape(node: fx.Node) -> ValueShape:
    """The shape of a node's value."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        kind = "unknown" if value is None else type(value).__name__
        return ValueShape(node.name, kind, (), {}, 0)
    shape: tuple[Any, ...] = tuple(value.shape)  # the stubs know no SymInt here
    sizes = tuple(size if isinstance(size, int) else str(size.node.expr) for size in shape)
    ranges = {str(s.node.expr): size_range(s) for s in shape if isinstance(s, torch.SymInt)}
    dtype = str(value.dtype).removeprefix("torch.")
    return ValueShape(node.name, dtype, sizes, ranges, bytes_of(value))
