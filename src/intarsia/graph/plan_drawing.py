"""A plan as a drawing: nodes with engines, shapes, source lines and reasons; segments and what they pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from intarsia.drawing import Drawing, DrawnLayers, DrawnNode, DrawnSegment
from intarsia.graph.border import borders
from intarsia.graph.nodes import module_path, op_name, source_line
from intarsia.graph.plan_text import ops_text
from intarsia.graph.segment import Segment
from intarsia.graph.shapes import segment_shapes, value_shape
from intarsia.tracing import Profile, segment_name


@dataclass(frozen=True)
class PlanDetails:
    """What a drawing shows and a plan does not hold: it takes converters and engines to find it."""

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
    """For each node, the shown nodes that it reads, directly or through nodes that are not shown."""
    sources: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        read: dict[int, None] = {}
        for value in node.all_input_nodes:
            read.update(dict.fromkeys([places[value]] if value in places else sources[value]))
        sources[node] = tuple(read)
    return sources


def profiled(drawing: Drawing, profile: Profile) -> Drawing:
    """The drawing with the median time of each segment in a profile."""
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
