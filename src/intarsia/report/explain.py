"""`explain`: the dry run of compilation, up to the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from torch import fx, nn

from intarsia.build.control_flow import bodies
from intarsia.build.details import plan_details
from intarsia.capture.autocast import refuse_autocast
from intarsia.capture.device import device_kind
from intarsia.capture.input import check_call, resolve_call
from intarsia.capture.random_state import keeps_random_state
from intarsia.convert import registry
from intarsia.engines import Engine, resolve_engines
from intarsia.graph.border import borders
from intarsia.graph.nodes import module_path, op_name, source_line
from intarsia.graph.shapes import segment_shapes
from intarsia.lower.generalize import lower_model
from intarsia.options import CompileKeywords, CompileOptions
from intarsia.partition import PartitionOptions, Plan, Strategy, SupportTable
from intarsia.partition.advice import advise
from intarsia.partition.names import check_names
from intarsia.partition.support import support_table
from intarsia.report.explanation import Explanation, NodeReport, SegmentReport
from intarsia.rewrite import Patterns


@keeps_random_state
def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Unpack[CompileKeywords],
) -> Explanation:
    """Say what `compile` would run where, and why; no engine is built and nothing is run.

    The arguments are those of `compile`. Nothing is measured: where `compile` would measure, the plan shown
    is the one that engines in their order give, and a note says so. The advice names the ops that, if an
    engine took them, would save segments. Bodies of control flow are explained too, each by itself.

    Example:
        >>> import torch, intarsia
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> explanation = intarsia.explain(model, (torch.ones(1, 8),), engines="pytorch")
        >>> print(str(explanation).splitlines()[0])
        Plan by dependency: 1 segment, 0 of 2 nodes (0%) on engines
    """
    checked = CompileOptions.of(**options)
    check_call(args, kwargs)
    args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs or {}, dynamic_shapes)
    device = device_kind(model, args, kwargs)
    refuse_autocast(device)
    usable, notes = resolve_engines(checked.engines, device)
    lowered, _ = lower_model(
        model, args, kwargs, dynamic_shapes, has_converter=registry.__contains__, drop_guards=True
    )
    check_names(lowered.module, checked.limits, [engine.name for engine in usable])
    placement = checked.placement
    if placement.measured is not None:
        notes.append("nothing is measured here: the plan is the one that engines in their order give")
    limits, patterns = checked.limits, checked.rewrite
    notes += lowered.notes
    return _explain(lowered.module, usable, placement.strategy, limits, patterns, tuple(notes))


def _explain(
    gm: fx.GraphModule,
    engines: Sequence[Engine],
    strategy: Strategy,
    options: PartitionOptions,
    patterns: Patterns,
    notes: tuple[str, ...] = (),
) -> Explanation:
    explanation = explain_graph(gm, support_table(gm, engines), strategy, options, notes=notes)
    details = partial(plan_details, gm, engines, strategy, options, patterns)
    inner = {
        f"{node.name}.{name}": _explain(body, engines, strategy, options, patterns)
        for node, name, body in bodies(gm)
    }
    return replace(explanation, plan=replace(explanation.plan, details=details), bodies=inner)


def explain_graph(
    gm: fx.GraphModule,
    table: SupportTable,
    strategy: Strategy,
    options: PartitionOptions | None = None,
    *,
    notes: tuple[str, ...] = (),
) -> Explanation:
    """The same for a graph and a support table that are at hand."""
    options = options or PartitionOptions()
    plan = strategy(gm, table, options).verify(gm)
    shapes = segment_shapes(borders(gm.graph, plan.segments))
    segments = tuple(
        SegmentReport(number, segment.engine, len(segment), segment.do_not_merge, shapes[number])
        for number, segment in enumerate(plan.segments)
    )
    return Explanation(plan, segments, _nodes(plan), tuple(advise(gm, table, strategy, options)), notes)


def _nodes(plan: Plan) -> tuple[NodeReport, ...]:
    return tuple(
        NodeReport(
            name=node.name,
            op=op_name(node),
            module=module_path(node),
            source=source_line(node, full=True),
            segment=number,
            engine=segment.engine,
            reasons=dict(segment.reasons.get(node, {})),
        )
        for number, segment in enumerate(plan.segments)
        for node in segment.nodes
    )
