"""`explain`: compilation up to the plan, as text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import fx, nn

from intarsia.build.control_flow import bodies
from intarsia.build.details import Advice, advise, plan_details
from intarsia.capture.example import Call, device_kind, refuse_autocast
from intarsia.capture.input import check_call, resolve_call
from intarsia.capture.protect import initialized, keeps_random_state
from intarsia.compiler.parts import explain_parts, names_within
from intarsia.convert import registry
from intarsia.drawing import Drawing, Pictured, bytes_text
from intarsia.engines import Engine, resolve_engines
from intarsia.errors import CaptureError, LoweringError, first_line
from intarsia.graph.border import borders
from intarsia.graph.nodes import module_path, op_name, source_line
from intarsia.graph.plan import Plan
from intarsia.graph.plan_text import SegmentShapes, segment_shapes
from intarsia.logs import working
from intarsia.lower.model import lower_model
from intarsia.options import CompileKeywords, CompileOptions
from intarsia.partition import PYTORCH, PartitionOptions, Strategy, SupportTable
from intarsia.partition.names import check_names
from intarsia.partition.support import support_table
from intarsia.partition.table import unmatched_chains
from intarsia.rewrite import Patterns

if TYPE_CHECKING:
    from rich.console import RenderableType


@keeps_random_state
def explain(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Unpack[CompileKeywords],
) -> Explanation:
    """Return what `compile` would run on which engine, and why. Nothing is built or run.

    The arguments are those of `compile`. If `compile` would measure plans, the plan shown here is that of the
    engines in their default order, and a note says so. The advice names the operators whose support would
    save the most segments. Bodies of control flow are explained separately. So are the submodules of a model
    that is compiled in parts.

    Example:
        >>> import torch, intarsia
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> explanation = intarsia.explain(model, (torch.ones(1, 8),), engines="pytorch")
        >>> print(str(explanation).splitlines()[0])
        Plan by dependency: 1 segment, 0 of 2 nodes (0%) on engines
    """
    checked = CompileOptions.of(**options)
    check_call(model, args, kwargs)
    args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs or {}, dynamic_shapes)
    device = device_kind(model, args, kwargs)
    refuse_autocast(device)
    usable, notes = resolve_engines(checked.engines, device)
    notes += initialized(model, (args, kwargs))
    if checked.placement.measured is not None:
        notes.append("explain measures nothing; this plan uses the engines in their default order")
    try:
        return _explain_module(model, (args, kwargs), dynamic_shapes, usable, checked, notes)
    except (CaptureError, LoweringError) as error:
        if checked.is_strict or not isinstance(model, nn.Module) or dynamic_shapes is not None:
            raise
        notes.append(f"the model is not captured as a whole: {first_line(error)}")
    return _explain_parts(model, (args, kwargs), usable, checked, notes)


def _explain_module(
    model: nn.Module,
    call: Call,
    dynamic_shapes: Any,
    engines: Sequence[Engine],
    options: CompileOptions,
    notes: Sequence[str] = (),
) -> Explanation:
    """The plan of a model that can be captured whole."""
    with working("exporting and lowering"):
        lowered, _ = lower_model(
            model, *call, dynamic_shapes, has_converter=registry.__contains__, drop_guards=True
        )
    limits, strategy = options.limits, options.placement.strategy
    check_names(lowered.module, limits, [engine.name for engine in engines])
    all_notes = (*notes, *lowered.notes, *unmatched_chains(lowered.module, limits))
    return _explain(lowered.module, engines, strategy, limits, options.rewrite, all_notes)


def _explain_parts(
    model: nn.Module, call: Call, engines: Sequence[Engine], options: CompileOptions, notes: Sequence[str]
) -> Explanation:
    """The plans of the submodules that `compile` would compile, in `bodies` by path."""

    def explain_one(path: str, module: nn.Module, call: Call, dynamic_shapes: Any) -> Explanation:
        inner = names_within(model, path, options.limits.torch_executed_modules)
        limits = replace(options.limits, torch_executed_modules=inner)
        return _explain_module(module, call, dynamic_shapes, engines, replace(options, limits=limits))

    parts, failures = dict[str, Explanation](), dict[str, str]()
    if options.fallback == "parts" and not isinstance(model, torch.jit.ScriptModule):
        parts, failures = explain_parts(model, call, explain_one)
    all_notes = (*notes, *(f"{path} runs as it is: {why}" for path, why in failures.items()))
    return Explanation(Plan((), "parts"), (), (), (), all_notes, parts)


def _explain(
    gm: fx.GraphModule,
    engines: Sequence[Engine],
    strategy: Strategy,
    options: PartitionOptions,
    patterns: Patterns,
    notes: tuple[str, ...] = (),
) -> Explanation:
    with working("asking the engines about every node"):
        table = support_table(gm, engines)
    explanation = explain_graph(gm, table, strategy, options, notes=notes)
    details = partial(plan_details, gm, engines, strategy, options, patterns)
    whole = {
        node for segment in explanation.plan.segments if segment.engine != PYTORCH for node in segment.nodes
    }
    inner = {
        f"{node.name}.{name}": _explain(body, engines, strategy, options, patterns)
        for node, name, body in bodies(gm)
        if node not in whole
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
    """The explanation of a graph with a support table."""
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


@dataclass(frozen=True)
class NodeReport:
    """One node: its operator, its source, its engine, and why other engines refused it."""

    name: str
    op: str
    module: str
    source: str
    segment: int
    engine: str
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class SegmentReport:
    """One segment: its engine, its number of nodes, and the shapes at its border."""

    number: int
    engine: str
    nodes: int
    do_not_merge: bool
    shapes: SegmentShapes


@dataclass(frozen=True, eq=False)
class Explanation(Pictured):
    """The result of `explain`. Use `print`, `to_json()` or `to_html()`.

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
    # Bodies of control flow by node and name; submodules of a model in parts by path.
    bodies: Mapping[str, Explanation] = field(default_factory=dict)

    def to_json(self, indent: int | None = 2) -> str:
        """The explanation as JSON, with keys in a fixed order."""
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
        """The data of the pictures. Bodies of control flow are separate drawings."""
        inner = {name: body.drawing() for name, body in self.bodies.items()}
        return replace(self.plan.drawing(), notes=self.notes, bodies=inner)

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
        sentences = [Text(f"advice: {advice}") for advice in self.advice]
        sentences += [Text(f"note: {note}") for note in self.notes]
        inner = [part for name, body in self.bodies.items() for part in (Text(f"body {name}"), body)]
        return Group(
            self.plan.__rich__(), borders, *([refused] if refused.row_count else []), *sentences, *inner
        )


def _list(values: tuple[object, ...], most: int = 6) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown + (f", {len(values) - most} more" if len(values) > most else "")
