"""Ways to run the whole model, those a search begins with, and what building one gives.

A mix is a support table in which every engine but the measured one refuses a block's nodes. The ordinary
strategy does the rest, so there is no second partitioner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from intarsia.build.builder import Builder, BuildSettings, Timed
from intarsia.build.faithful import Example
from intarsia.cache.machine import digest
from intarsia.capture.example import Call
from intarsia.choose.findings import MOVED, Trial
from intarsia.choose.measured import Measured
from intarsia.engines import Engine, Program, Workload
from intarsia.graph.nodes import is_control_flow, uses_gpu
from intarsia.partition import PYTORCH, PartitionOptions, Piece, Plan, Strategy, SupportTable
from intarsia.runtime.compiled import Compiled

# From what was built to the module that answers calls.
Finish = Callable[[Plan, Sequence[Piece], Sequence[Program], Builder], Compiled]


@dataclass(frozen=True)
class Candidate:
    """Engines with their options, PyTorch last; for a mix, the engine of every block and of every node.

    Without engines it is the model as it is.
    """

    name: str
    engines: tuple[Engine, ...]
    rewritten: bool = True
    options: int = 0  # how many options are not the usual ones
    blocks: tuple[str, ...] = ()
    homes: Mapping[fx.Node, str] | None = None

    @property
    def is_exact(self) -> bool:
        return all(engine.is_exact for engine in self.engines)

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.engines)

    @property
    def is_slow_to_build(self) -> bool:
        return any(engine.slow_to_build for engine in self.engines)


@dataclass(frozen=True)
class Sample:
    """The inputs for measuring candidates: a call of the model, and the graph's inputs for it."""

    call: tuple[Sequence[Any], Mapping[str, Any]]
    inputs: Sequence[Any]


def sample_of(examples: Sequence[Example], call: Call, *, largest: bool) -> Sample:
    """The user's own call among the examples, or the `largest` of all, which sizes that vary allow."""
    own = next((example for example in examples if example.call[0] is call[0]), examples[0])
    if largest:
        own = max([own, *examples], key=lambda example: example.elements)
    return Sample(own.call, own.inputs)


@dataclass(frozen=True)
class Built:
    """A candidate that was built and verified."""

    candidate: Candidate
    module: Compiled
    shape: str
    build_s: float
    error: float = 0.0  # end to end, where there is a tolerance
    errors: Mapping[str, float] = field(default_factory=dict)  # of their segments, by first node

    def call(self, sample: Sample) -> Callable[[], object]:
        """One call, as it is measured: of the graph, so that nothing is written back; or of the model."""
        module = self.module
        if self.candidate.engines:
            return lambda: module.results(sample.inputs)
        args, kwargs = sample.call
        return lambda: module(*args, **kwargs)

    def trial(self, seconds: tuple[float, ...], *, final: bool, before: Trial | None = None) -> Trial:
        """The findings about it after it was measured; `before` is what an earlier race had shown."""
        own, count = self.candidate, len(self.module.plan)
        quickest = min(*seconds, math.inf if before is None else before.quickest)
        return Trial(
            own.name,
            count,
            seconds,
            own.options,
            self.build_s,
            self.shape,
            own.blocks,
            final,
            self.error,
            quickest,
        )


@dataclass(frozen=True)
class Workshop:
    """Builds candidates: `builder` is the pattern for their builders, `table` has the engines of nodes."""

    builder: Builder
    table: SupportTable
    finish: Finish
    eager: Callable[[], Compiled]  # the module that runs the model as it is
    error: Callable[[Compiled], float] = lambda module: math.inf  # end to end, against the model
    may_vary_patterns: bool = True  # unless the user named them
    began: float = field(default_factory=time.perf_counter)  # when the compile began
    # Nodes that an engine failed on, found by bisection: they are not looked for again in its other variants.
    faults: dict[fx.Node, dict[str, str]] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether any of the graph runs on a GPU."""
        return uses_gpu(self.builder.module.graph)

    def workload(self, measured: Measured) -> Workload:
        """The description of the workload for engines that are asked for options worth measuring."""
        thorough = measured.budget_s is not None
        return Workload(self.builder.module, self.on_gpu, measured.objective, thorough)

    def plan(self, candidate: Candidate) -> Plan:
        """The segments that would be built, if nothing fails."""
        builder = self._builder(candidate)
        return builder.plan(self._table(candidate)).plan

    def fingerprint(self, candidate: Candidate) -> str:
        """Equal for candidates of which the same programs would be built."""
        if not candidate.engines:
            return candidate.name
        plan = self.plan(candidate)
        inner = any(is_control_flow(node) for node in plan.nodes)  # bodies go to any of the engines
        used = sorted(e.key() for e in candidate.engines if inner or e.name in plan.engines)
        return digest(shape_of(plan), str(candidate.rewritten), *used)

    def build(self, candidate: Candidate, deadline: float | None = None, timed: Timed | None = None) -> Built:
        """Build a candidate; every program of it is tried against PyTorch on the way.

        No piece is begun after the `deadline`: OutOfTime then. None that answers wrongly is repaired where it
        is slower than what is `timed`: TooSlow then.
        """
        start = time.perf_counter()
        if not candidate.engines:
            module = self.eager()
            return Built(candidate, module, shape_of(module.plan), time.perf_counter() - start)
        builder = self._builder(candidate, deadline, timed)
        plan, pieces, programs = builder.run(self._table(candidate))
        module = self.finish(plan, pieces, programs, builder)
        error = 0.0 if builder.settings.tolerance is None else self.error(module)
        took = time.perf_counter() - start
        return Built(candidate, module, shape_of(plan), took, error, dict(builder.errors))

    def _builder(
        self, candidate: Candidate, deadline: float | None = None, timed: Timed | None = None
    ) -> Builder:
        pattern, homes = self.builder, candidate.homes
        usual = pattern.settings
        tolerance = usual.tolerance
        if tolerance is not None and not candidate.is_exact:
            tolerance = math.inf  # what counts is the error of the whole
        settings = BuildSettings(
            usual.options.among(candidate.engine_names),
            usual.strategy if homes is None else at_homes(usual.strategy, homes),
            usual.rewrite if candidate.rewritten else None,
            usual.build_limit_s,
            tolerance,
            deadline,
            timed,
        )
        engines, examples = candidate.engines, pattern.examples
        return Builder(pattern.module, engines, settings, examples, pattern.cases, faults=self.faults)

    def _table(self, candidate: Candidate) -> SupportTable:
        table = self.table.with_engines(tuple(engine.name for engine in candidate.engines))
        return table.with_refusals(self.faults)


def at_homes(base: Strategy, homes: Mapping[fx.Node, str]) -> Strategy:
    """The strategy `base`, where a node that has a home goes there or to PyTorch."""

    def strategy(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> Plan:
        refused: dict[fx.Node, dict[str, str]] = {}
        for node, home in homes.items():
            others = [engine for engine in table.engines if engine not in (home, PYTORCH)]
            refused[node] = dict.fromkeys(others, f"{MOVED} {home}")
        return base(gm, table.with_refusals(refused), options)

    return strategy


def shape_of(plan: Plan) -> str:
    """A digest of the engine of every node."""
    parts: list[Any] = [(s.engine, *(node.name for node in s.nodes)) for s in plan.segments]
    return digest(*map(repr, parts))


def line_ups(workshop: Workshop, engines: Sequence[Engine], measured: Measured) -> list[Candidate]:
    """The plans that the result must not be slower than; first the plan that is used without measuring."""
    *others, pytorch = [engine for engine in engines if engine.is_exact]
    known = {engine.name: engine for engine in others}
    for engine in measured.candidates or ():
        known.setdefault(engine.name, engine)  # an engine that is only named here
    alone = [Candidate(name, (engine, pytorch)) for name, engine in known.items()]
    if not workshop.on_gpu:  # there an engine that is slow to build is the one taken without measuring
        alone.sort(key=lambda candidate: candidate.is_slow_to_build)
    line_ups = [*alone[:1], *_in_pytorch(workshop, pytorch, measured), *alone[1:]]
    quick = [engine for engine in others if not engine.slow_to_build]
    if len(quick) < 2:
        return line_ups
    together = Candidate(" > ".join(engine.name for engine in quick), (*quick, pytorch))
    used = [name for name in workshop.plan(together).engines if name != PYTORCH]
    if len(used) < 2:  # one engine takes all that any takes, and its own plan is the same
        return sorted(line_ups, key=lambda candidate: candidate.name not in used)
    return [together, *line_ups]


def _in_pytorch(workshop: Workshop, pytorch: Engine, measured: Measured) -> list[Candidate]:
    """The graph in PyTorch, also by faster kernels, since that costs no build; and the model as it is.

    A model that writes to what measuring must not change does not run as it is.
    """
    if workshop.builder.settings.options.require_full_compilation:
        return []
    graphs = [Candidate(PYTORCH, (pytorch,))]
    for label, variant in pytorch.variants(workshop.workload(measured)):
        graphs.append(Candidate(f"{PYTORCH}, {label}", (variant,), options=1))
    if workshop.builder.module.meta.get("writes"):
        return graphs
    # Of two as fast, the graph: its weights are those that were compiled.
    return [*graphs, Candidate("eager", (), options=1)]


def with_other_options(plan: Candidate, workshop: Workshop, measured: Measured) -> list[Candidate]:
    """A plan with other options of its first engine."""
    if not plan.engines:
        return []
    first, *rest = plan.engines
    return [
        replace(plan, name=f"{plan.name}, {label}", engines=(variant, *rest), options=1)
        for label, variant in _variants(first, workshop, measured)
    ]


def _variants(engine: Engine, workshop: Workshop, measured: Measured) -> list[tuple[str, Engine]]:
    """Other options of an engine, each with a label: the user's candidates, or what the engine proposes."""
    if measured.candidates is None:
        return engine.variants(workshop.workload(measured))
    others = [other for other in measured.candidates if other.name == engine.name]
    return [(_differences(other, engine), other) for other in others]


def _differences(engine: Engine, usual: Engine) -> str:
    """The options of an engine that differ from the usual ones, as a label."""
    names: Sequence[str] = list(getattr(engine, "__dataclass_fields__", {}))
    values = {name: getattr(engine, name, None) for name in names}
    differing = [f"{name}={value}" for name, value in values.items() if value != getattr(usual, name, None)]
    return ", ".join(differing) or "as given"


def without_patterns(plan: Candidate, workshop: Workshop, measured: Measured) -> list[Candidate]:
    """A plan whose networks stay as they were converted, where that may make a difference."""
    if not plan.engines or plan.engines[0].name == PYTORCH or plan.is_slow_to_build:
        return []
    if (
        measured.candidates is not None
        or workshop.builder.settings.rewrite is None
        or not workshop.may_vary_patterns
    ):
        return []
    return [replace(plan, name=f"{plan.name}, no patterns", rewritten=False, options=1)]
