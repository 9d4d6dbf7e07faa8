"""The compile job: what happens to a model, stage by stage.

    prepare   the example call, the device and the engines
    capture   the model runs once on the example; the stages below compare with its answer
    lower     torch.export, then functional ATen; the graph must answer as the model does
    support   node x engine -> None, or the reason why the engine refuses the node
    plan      a strategy cuts the graph into segments
    build     every segment becomes a program, tried on the examples; or
    choose    several plans are built and measured, and the fastest is taken
    verify    the whole module is compared with the model
    finish    the module goes to the build cache, and can be refitted

Each stage returns a value that later stages only read.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from intarsia import archive as archive  # compiled modules are pickled through it
from intarsia.build.details import plan_details
from intarsia.build.judge import (
    Answer,
    Example,
    Judge,
    LoweredModel,
    error_of,
    examples_of,
    faithful_lowering,
    further_examples,
    operators_of,
    whole_fault,
    with_layouts_of,
)
from intarsia.build.repair import suspects
from intarsia.build.trial import elements_of
from intarsia.capture.example import Call, device_kind, refuse_autocast
from intarsia.capture.export import capture
from intarsia.capture.input import further_calls, resolve_call
from intarsia.capture.protect import initialized, undisturbed
from intarsia.capture.run_effects import Effect, settled, watched
from intarsia.choose.candidate import Workshop, sample_of
from intarsia.choose.choose import choose
from intarsia.choose.findings import EAGER
from intarsia.choose.measured import Measured, is_measuring, refuse_short_engines, too_small_to_measure
from intarsia.compiler.assembler import Assembler
from intarsia.compiler.build_cache import CacheEntry, cache_entry
from intarsia.compiler.refit import Refit, same_cuts
from intarsia.convert import registry
from intarsia.engines import Engine, resolve_engines, with_short_engines, with_unasked_engines
from intarsia.errors import InputError, PartitionError, count_text
from intarsia.logs import LOG, log_refusals, stage
from intarsia.lower import Lowered
from intarsia.lower.lowered import example_inputs
from intarsia.lower.model import lower_model
from intarsia.options import CompileOptions, Placement
from intarsia.partition import Plan, SupportTable
from intarsia.partition.names import check_names
from intarsia.partition.support import support_table
from intarsia.partition.table import unmatched_chains
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.weights import release_memory


def prepare(
    options: CompileOptions,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    began: float,
) -> CompileJob:
    """The job of a compile: every `Input` is drawn, and the engines of the device are found."""
    args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs, dynamic_shapes)
    device = device_kind(model, args, kwargs)
    refuse_autocast(device)
    if options.cuda_graphs not in (None, False) and device != "cuda":
        raise InputError(
            f"cuda_graphs={options.cuda_graphs!r} needs a model on a CUDA device; this one is on {device}"
        )
    usable, notes = resolve_engines(options.engines, device)
    placement, arithmetic = options.placement, options.arithmetic
    is_open = options.engines is None and options.limits.backend_priority is None
    by_default = is_open and options.partition is None and not arithmetic
    if by_default and device in ("cpu", "cuda") and len(usable) > 1 and is_measuring():
        placement = replace(placement, measured=Measured(), by_default=device == "cpu")
        usable = with_unasked_engines(usable, device, None if device == "cuda" else model)
    elif options.engines is None and placement.measured is not None:
        usable = with_unasked_engines(usable, device)
    if arithmetic:
        usable, missing = with_short_engines(usable, arithmetic)
        notes += [f"{name} is not tried: {reason}" for name, reason in missing.items()]
    elif placement.measured is not None:
        refuse_short_engines(usable)
    notes += initialized(model, (args, kwargs))
    request = Request((args, kwargs), dynamic_shapes, tuple(notes), began)
    return CompileJob(model, request, tuple(usable), options, placement)


@dataclass(frozen=True)
class Request:
    """The example call that a model is compiled for, notes on it, and when the compile began."""

    call: Call
    dynamic_shapes: Any = None
    notes: tuple[str, ...] = ()
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Captured:
    """What the model answers to the example; None without verification, or if the model fails."""

    judge: Judge | None = None
    truth: Answer | None = None
    effects: tuple[Effect, ...] = ()  # what a run of the model changes and a graph does not


@dataclass(frozen=True)
class Support:
    """Which engine can run which node; with `measured`, measurement decides between them."""

    engines: tuple[Engine, ...]
    table: SupportTable
    measured: Measured | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class CompileJob:
    """One compile of a model, or of one part of it. `run` calls the stages in order."""

    model: nn.Module | ExportedProgram | None  # None for new weights without a model
    request: Request
    engines: tuple[Engine, ...]
    options: CompileOptions
    placement: Placement
    part_graphs: list[fx.GraphModule] | None = None  # where the model is a part: the graphs of all parts

    @property
    def size(self) -> int:
        """The number of modules in the model, by which the logger estimates the time of a stage."""
        return sum(1 for _ in self._module.modules()) if self._module is not None else 1

    def run(self) -> Compiled:
        """The compiled module."""
        try:
            return self._run()
        finally:
            release_memory(self._module)

    def _run(self) -> Compiled:
        captured = self.capture()
        release_memory(self._module, mapped=False)  # what layers unpack of their weights
        graph = self.lower(captured)
        release_memory(self._module)
        cache = self.cache_entry(graph)
        earlier = cache.module(self._module, graph.lowered)
        if earlier is not None:
            return self.finish(graph, earlier)
        graph = self.check(captured, graph)
        if graph.fault is not None:
            return self.as_it_is(graph, graph.fault)
        support = self.support(graph)
        release_memory(self._module)
        if support.measured is None:
            compiled = self.build(graph, support)
        else:
            compiled = self.choose(graph, support, support.measured)
        release_memory(self._module)  # engines have read all weights
        verified = self.verify(captured, graph, support, compiled)
        seconds, plan = time.perf_counter() - self.request.began, verified.plan
        segments = count_text(len(plan), "segment")
        LOG.info("compiled in %.2f s: %s on %s", seconds, segments, ", ".join(plan.engines))
        if verified is compiled:
            self.store(cache, graph, compiled)
        return self.finish(graph, verified)

    @stage("running the model")
    def capture(self) -> Captured:
        """Run the model on the example. This comes first, so that its answer is the untouched model's."""
        if not self.options.accuracy.verify:
            return Captured()
        assert self.model is not None
        judge = Judge(self.model)
        with watched(judge.model) as effects:
            truth = judge.answer_if_any(self.request.call)
        if truth is None:
            return Captured(judge)
        return Captured(judge, truth, tuple(settled(effects, judge.model, self.request.call)))

    @stage("exporting and lowering")
    def lower(self, captured: Captured) -> LoweredModel:
        """Export and lower the model. The examples are the call and the ends of the size ranges."""
        effects = captured.effects
        if captured.judge is None:
            assert self._module is not None
            with watched(self._module) as seen:
                lowered, call = self._lowered()
            effects = tuple(settled(seen, self._module, call))
            examples, unverified = [Example(call, example_inputs(lowered, *call))], list[str]()
        else:
            judge, (lowered, call) = captured.judge, self._lowered()
            examples, unverified = examples_of(judge, lowered, call, self.request.call, captured.truth)
            lowered = with_layouts_of(judge, lowered, examples)
        notes = (*self.request.notes, *(effect.text for effect in effects), *unverified)
        differences = tuple(effect.text for effect in effects if effect.follows == "warning")
        return LoweredModel(lowered, examples, notes, differences=differences)

    def _lowered(self) -> tuple[Lowered, Call]:
        assert self.model is not None
        return lower_model(
            self.model,  # type: ignore[arg-type]
            *self.request.call,
            self.request.dynamic_shapes,
            has_converter=registry.__contains__,
            drop_guards=self.options.accuracy.verify,
        )

    def cache_entry(self, graph: LoweredModel) -> CacheEntry:
        """The place of this compile in the build cache. Parts and compiles with a tolerance have none."""
        accuracy, model = self.options.accuracy, self.model
        is_whole = self.part_graphs is None and isinstance(model, nn.Module)
        if not is_whole or accuracy.tolerance is not None or accuracy.examples:
            return CacheEntry(None)
        assert isinstance(model, nn.Module)
        settings = (
            *(self.placement.strategy, self.placement.measured, self.placement.by_default),
            *(self.options.limits, self.options.rewrite, self.options.cuda_graphs, accuracy.verify),
            *(list(graph.notes), inspect.signature(model.forward)),
        )
        return cache_entry(graph.lowered, graph.examples, self.engines, settings)

    @stage("comparing the graph with the model")
    def check(self, captured: Captured, graph: LoweredModel) -> LoweredModel:
        """The graph, compared with the model. Decompositions that change its answers are left out."""
        checked = graph
        if captured.judge is not None:
            checked = faithful_lowering(
                captured.judge, graph, partial(self.lower, captured), self._exported_operators
            )
        if captured.judge is not None and checked.fault is None:
            calls = further_calls(self.options.accuracy.examples, self.request.call[1])
            more = further_examples(captured.judge, checked.lowered, calls)
            checked = replace(checked, examples=[*checked.examples, *more])
        module = checked.lowered.module
        self._check_names(module)
        return replace(checked, notes=(*checked.notes, *unmatched_chains(module, self.options.limits)))

    def _exported_operators(self) -> set[Any]:
        assert self.model is not None
        program = capture(self.model, *self.request.call, self.request.dynamic_shapes)  # type: ignore[arg-type]
        return operators_of(program.graph)

    def _check_names(self, module: fx.GraphModule) -> None:
        """Raise for a name in the options that means nothing. Those of parts are checked over all parts."""
        if self.part_graphs is None:
            check_names(module, self.options.limits, [engine.name for engine in self.engines])
        else:
            self.part_graphs.append(module)

    @stage("asking the engines about every node")
    def support(self, graph: LoweredModel) -> Support:
        """Ask every engine about every node, and decide whether to measure."""
        module, measured, notes = graph.lowered.module, self.placement.measured, tuple[str, ...]()
        small = too_small_to_measure(module) if self.placement.by_default and measured is not None else None
        if small is not None:
            measured, notes = None, (small,)
        engines = self.engines if measured is not None else self._quick_engines()
        table = support_table(module, engines, self.options.build_limit_s)
        log_refusals(table.refusals)
        return Support(engines, table, measured, notes)

    def _quick_engines(self) -> tuple[Engine, ...]:
        """The engines without those that only a search by default tries."""
        if not self.placement.by_default:
            return self.engines
        return tuple(engine for engine in self.engines if engine.is_default("cpu"))

    @stage("building the segments")
    def build(self, graph: LoweredModel, support: Support) -> Compiled:
        """Plan by the strategy and build every segment. If a build fails, its nodes go to the next engine."""
        builder = self._assembler.builder(graph, support.engines, support.notes)
        return self._assembler.inlay(graph, builder.run(support.table), builder)

    @stage("choosing by measurement")
    def choose(self, graph: LoweredModel, support: Support, measured: Measured) -> Compiled:
        """Build several plans, measure them on this machine, and take the fastest.

        Plans are compared with the model on calls up to the size of the one that is timed. `verify` compares
        the fastest plan on larger calls, too.
        """
        lowered, options = graph.lowered, self.options
        sample = sample_of(graph.examples, self.request.call, largest=measured.objective == "throughput")
        size = elements_of(sample.inputs)
        tried = replace(graph, examples=[e for e in graph.examples if e.elements <= size])
        workshop = Workshop(
            self._assembler.builder(tried, support.engines, support.notes),
            support.table,
            partial(self._assembler.inlay, graph),
            partial(self._assembler.eager, graph, self._quick_engines(), EAGER, "chosen"),
            partial(error_of, lowered, graph.examples),
            options.rewrite is None,
            self.request.began,
        )
        settings = f"{options.rewrite} {options.accuracy.verify} {options.cuda_graphs}"
        model = self._module
        with nullcontext() if model is None else undisturbed(model):  # the model itself is measured, too
            return choose(measured, workshop, support.engines, sample, settings, options.accuracy.tolerance)

    @stage("comparing the whole with the model")
    def verify(
        self, captured: Captured, graph: LoweredModel, support: Support, compiled: Compiled
    ) -> Compiled:
        """The module, without the engine or segment at fault if its answers differ from the model's."""
        if captured.judge is None:
            return compiled
        fault = self.mismatch(captured.judge, graph, compiled)
        if fault is None:
            return compiled
        engines = self._quick_engines()
        table = support.table.with_engines(tuple(engine.name for engine in engines))
        note = f"the fastest plan is not used: with it, the compiled model {fault}"
        retries = [] if support.measured is None else [(dict[fx.Node, dict[str, str]](), note)]
        for refusals, note in (*retries, *suspects(graph.lowered.module.graph, compiled.plan, fault)):
            narrowed = Support(engines, table.with_refusals(refusals), notes=(*support.notes, note))
            candidate = self.build(graph, narrowed)
            if self.mismatch(captured.judge, graph, candidate) is None:
                return candidate
        return self.as_it_is(graph, fault)

    def mismatch(self, judge: Judge, graph: LoweredModel, compiled: Compiled) -> str | None:
        """How the answers of the module differ from the model's; None if they agree.

        The rounding that is allowed is that of the coarsest engine in use.
        """
        names = {name for plan in (compiled.plan, *compiled.body_plans.values()) for name in plan.engines}
        coarsest = max((engine.coarsest for engine in self.engines if engine.name in names), default=0.0)
        tolerance = self.options.accuracy.tolerance
        # If the model itself was the fastest, it is compared at the example only.
        examples = graph.examples if compiled.runs_graph else graph.examples[:1]
        return whole_fault(judge, graph.lowered, compiled, examples, coarsest, tolerance)

    def store(self, cache: CacheEntry, graph: LoweredModel, compiled: Compiled) -> None:
        """Store a verified module in the build cache."""
        if self.options.accuracy.verify and any(example.truth is None for example in graph.examples):
            return  # the model draws random numbers, so the module was not compared with it
        cache.store(compiled, time.perf_counter() - self.request.began)

    def finish(self, graph: LoweredModel, compiled: Compiled) -> Compiled:
        """The module with its refit and the details of its plan.

        Both live as long as the module, so neither may hold the model.
        """
        options, strategy = self.options, self.placement.strategy
        details = partial(
            plan_details, graph.lowered.module, self.engines, strategy, options.limits, options.rewrite
        )
        compiled.plan = replace(compiled.plan, details=details)
        without_model = replace(self, model=None, request=Request(((), {})), part_graphs=None)
        compiled.refit_by(Refit(without_model, graph.examples))
        compiled.differences = graph.differences if compiled.runs_graph else ()
        return compiled

    def rebuild(
        self, model: nn.Module | None, lowered: Lowered, examples: Sequence[Example], plans: Sequence[Plan]
    ) -> Compiled:
        """A module of the same graph with other weights, cut as these plans cut the graph and its bodies."""
        strategy = same_cuts(plans, self.placement.strategy)
        job = replace(self, model=model, placement=Placement(strategy))
        graph = LoweredModel(lowered, list(examples))
        return job.build(graph, job.support(graph))

    def as_it_is(self, graph: LoweredModel, fault: str) -> Compiled:
        """The model itself, run in PyTorch, because what was compiled answers differently."""
        if self.options.limits.require_full_compilation:
            raise PartitionError(f"full compilation is impossible: the compiled model {fault}")
        reason = f"the model runs as it is, in PyTorch: the compiled model {fault}"
        noted = replace(graph, notes=(*graph.notes, reason))
        return self._assembler.eager(noted, self._quick_engines(), reason, "required")

    @functools.cached_property
    def _assembler(self) -> Assembler:
        signature = inspect.signature(self.model.forward) if isinstance(self.model, nn.Module) else None
        return Assembler(self._module, signature, self.options, self.placement.strategy)

    @functools.cached_property
    def _module(self) -> nn.Module | None:
        """The model as a module; None for new weights without a model."""
        return self.model.module() if isinstance(self.model, ExportedProgram) else self.model
