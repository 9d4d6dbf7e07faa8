"""The plan: which engine runs which segment, in which order, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from intarsia.drawing import Drawing, Pictured, page
from intarsia.errors import PartitionError
from intarsia.graph.border import Border, borders
from intarsia.graph.nodes import is_compute, is_control_flow, is_free, producer, whereabouts
from intarsia.graph.plan_text import (
    DetailsSource,
    PlanDetails,
    heading,
    node_counts,
    plan_drawing,
    plan_table,
    plan_text,
    profiled,
)
from intarsia.graph.segment import Segment
from intarsia.graph.sizes import constant_value
from intarsia.tracing import Profile

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, eq=False)
class Plan(Pictured):
    """The segments of a model, in the order they run. `str(plan)` says what runs where, and why.

    Example:
        >>> gm = torch.fx.symbolic_trace(lambda x: torch.tanh(torch.relu(x)))
        >>> _, relu, tanh, _ = gm.graph.nodes
        >>> plan = Plan((Segment("mine", (relu,)), Segment("pytorch", (tanh,)))).verify(gm)
        >>> plan.engines, plan.engine_of(tanh)
        (('mine', 'pytorch'), 'pytorch')
    """

    segments: tuple[Segment, ...]
    strategy: str = ""
    bodies: Mapping[str, Plan] = field(default_factory=dict, repr=False)  # of control flow, by name
    # Details that a drawing shows, computed when the plan is drawn.
    details: DetailsSource | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Every compute node, in the order it runs."""
        return tuple(node for segment in self.segments for node in segment.nodes)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines in use, in the order they first run."""
        return tuple(dict.fromkeys(segment.engine for segment in self.segments))

    @property
    def on_engines(self) -> float:
        """The share of compute nodes, those of bodies too, that run on an engine other than PyTorch."""
        placed, total = node_counts(self.segments, self._body_segments)
        return placed / total if total else 0.0

    @property
    def _body_segments(self) -> dict[str, tuple[Segment, ...]]:
        return {name: plan.segments for name, plan in self.bodies.items()}

    def count(self, engine: str) -> int:
        """How many segments run on `engine`."""
        return sum(segment.engine == engine for segment in self.segments)

    def engine_of(self, node: fx.Node) -> str:
        """The engine that runs `node`."""
        for segment in self.segments:
            if node in segment.nodes:
                return segment.engine
        raise PartitionError(f"{whereabouts(node)} is in no segment of the plan")

    def verify(self, graph: fx.Graph | fx.GraphModule) -> Plan:
        """Return the plan if it is valid for `graph`; PartitionError if not."""
        graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
        position = {node: number for number, node in enumerate(graph.nodes)}
        homes = self._homes(position)
        for node in graph.nodes:
            if is_compute(node) and node not in homes:
                raise PartitionError(f"{whereabouts(node)} is in no segment")
        edges = borders(graph, self.segments)
        self._verify_order(position, edges)
        self._verify_control_flow()
        self._verify_crossings(edges)
        return self

    def _homes(self, position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        homes: dict[fx.Node, int] = {}
        for number, segment in enumerate(self.segments):
            if not segment.nodes:
                raise PartitionError(f"segment {number} on {segment.engine} is empty")
            for node in segment.nodes:
                if node not in position:
                    raise PartitionError(f"segment {number} holds {node.name}, which is not in the graph")
                if not is_compute(node):
                    raise PartitionError(
                        f"segment {number} holds {node.name}, which computes nothing ({node.op})"
                    )
                if node in homes:
                    raise PartitionError(f"{whereabouts(node)} is in segments {homes[node]} and {number}")
                homes[node] = number
        return homes

    def _verify_order(self, position: Mapping[fx.Node, int], edges: list[Border]) -> None:
        for number, segment in enumerate(self.segments):
            places = [position[node] for node in segment.nodes]
            if places != sorted(places):
                raise PartitionError(f"the nodes of segment {number} are not in graph order")
        ready: set[fx.Node] = set()
        for number, border in enumerate(edges):
            for value in border.inputs:
                if value.op != "placeholder" and value not in ready:
                    raise PartitionError(
                        f"segment {number} needs {whereabouts(value)}, which no earlier segment returns"
                    )
            ready.update(border.outputs)

    def _verify_control_flow(self) -> None:
        for number, segment in enumerate(self.segments):
            for node in segment.nodes:
                if is_control_flow(node) and (len(segment.nodes) > 1 or not segment.do_not_merge):
                    raise PartitionError(
                        f"segment {number} merges {whereabouts(node)} with others; control flow needs a"
                        f" segment of its own"
                    )

    def _verify_crossings(self, edges: list[Border]) -> None:
        for number, border in enumerate(edges):
            for value in (*border.inputs, *border.outputs):
                meta = value.meta.get("val")
                if meta is None or isinstance(meta, torch.Tensor):
                    continue
                if isinstance(meta, (list, tuple)):
                    raise PartitionError(
                        f"{whereabouts(value)} is a list and crosses the border of segment {number}"
                    )
                # A scalar may cross only where it is made: as an input of the graph, or by a compute node.
                if is_free(value) and constant_value(value) is None and not is_compute(producer(value)):
                    raise PartitionError(
                        f"{whereabouts(value)} is not a tensor and crosses the border of segment {number}"
                    )

    def to_json(self) -> str:
        """The plan as JSON: what runs where, in which order, and why not elsewhere."""
        segments = [
            {
                "engine": segment.engine,
                "nodes": [node.name for node in segment.nodes],
                "stands_alone": segment.do_not_merge,
                "reasons": {node.name: dict(why) for node, why in segment.reasons.items()},
            }
            for segment in self.segments
        ]
        content: dict[str, Any] = {"strategy": self.strategy, "segments": segments}
        if self.bodies:
            content["bodies"] = {name: json.loads(plan.to_json()) for name, plan in self.bodies.items()}
        return json.dumps(content, indent=1)

    def drawing(self, profile: Profile | None = None) -> Drawing:
        """The plan as plain data for drawings; with the times of a profile if one is given."""
        details = PlanDetails() if self.details is None else self.details(self.segments)
        title = heading(self.segments, self.strategy, self._body_segments)
        drawn = plan_drawing(self.segments, title, details)
        drawn = replace(drawn, bodies={name: plan.drawing() for name, plan in self.bodies.items()})
        return drawn if profile is None else profiled(drawn, profile)

    def to_html(self, profile: Profile | None = None) -> str:
        """The plan as one HTML page that needs nothing else: times, the graph, its layers, every fallback.

        Args:
            profile: the record of `intarsia.profile`, which has the times of the segments.

        >>> import intarsia
        >>> fast = intarsia.compile(torch.nn.ReLU(), (torch.ones(2),), engines="pytorch")
        >>> fast.plan.to_html().startswith("<!doctype html>")
        True
        """
        return page(self.drawing(profile))

    def __str__(self) -> str:
        return plan_text(self.segments, self.strategy, self._body_segments)

    def __rich__(self) -> Table:
        return plan_table(self.segments, self.strategy, self._body_segments)
