"""Candidates: plans for the whole model that a search builds and measures.

A mix is built from a support table in which only one engine accepts the nodes of a block. The same strategy
as for other plans makes its segments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from intarsia.build.builder import Builder, BuildSettings, Timed
from intarsia.build.judge import Example
from intarsia.cache.machine import digest
from intarsia.capture.example import Call
from intarsia.choose.findings import MOVED, Trial
from intarsia.choose.measured import Measured
from intarsia.engines import Engine, Workload
from intarsia.graph.nodes import is_control_flow, uses_gpu
from intarsia.partition import PYTORCH, PartitionOptions, Plan, Strategy, SupportTable
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.inlay import Assembly

Finish = Callable[[Assembly, Builder], Compiled]  # makes the compiled module


@dataclass(frozen=True)
class Candidate:
    """Engines with their options, PyTorch last; for a mix, the engine of every block and of every node.

    Without engines, the unchanged model runs.
    """

    name: str
    engines: tuple[Engine, ...]
    rewritten: bool = True
    options: int = 0  # the number of options that differ from the usual ones
    blocks: tuple[str, ...] = ()
    homes: Mapping[fx.Node, str] | None = None

    @property
    def is_exact(self) -> bool:
        return all(engine.is_exact for engine in self.engines)

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(engine.name for engine in self.engines)

    @property
    def has_programs(self) -> bool:
        """Whether an engine builds programs for it, which may have copies of the weights."""
        return any(engine.name != PYTORCH for engine in self.engines)

    @property
    def is_slow_to_build(self) -> bool:
        return any(engine.slow_to_build for engine in self.engines)


def sample_of(examples: Sequence[Example], call: Call, *, largest: bool) -> Example:
    """The example that plans are measured on: the user's own or, with `largest`, the one of most elements."""
    own = next((example for example in examples if example.call[0] is call[0]), examples[0])
    return max([own, *examples], key=lambda example: example.elements) if largest else own


@dataclass(frozen=True)
class Built:
    """A candidate that was built and verified."""

    candidate: Candidate
    module: Compiled
    shape: str
    build_s: float
    first_s: float = 0.0  # of the call that compared the answers of engines to the sample; 0 if none did
    is_traded: bool = False  # whether it may be faster without patterns
    error: float = 0.0  # end to end, if there is a tolerance
    errors: Mapping[str, float] = field(default_factory=dict)  # of its segments, by first node

    def call(self, sample: Example) -> Callable[[], object]:
        """The call that is measured: of the graph, so that nothing is written back, or of the model."""
        module = self.module
        if self.candidate.engines:
            return lambda: module.results(sample.inputs)
        args, kwargs = sample.call
        return lambda: module(*args, **kwargs)

    def trial(self, seconds: tuple[float, ...], *, final: bool, before: Trial | None = None) -> Trial:
        """The measurements of a race; `before` are those of an earlier race."""
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
    """Builds candidates: their builders are like `builder`, and `table` has the engines of nodes."""

    builder: Builder
    table: SupportTable
    finish: Finish
    eager: Callable[[], Compiled]  # the module that runs the model as it is
    error: Callable[[Compiled], float] = lambda module: math.inf  # end to end, against the model
    may_vary_patterns: bool = True  # false if the user chose them
    began: float = field(default_factory=time.perf_counter)  # when the compile began
    # Nodes on which an engine failed. Their bisection is not repeated for the engine's other options.
    faults: dict[fx.Node, dict[str, str]] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether a part of the graph runs on a GPU."""
        return uses_gpu(self.builder.module.graph)

    def workload(self, measured: Measured) -> Workload:
        """The workload, from which engines propose options to measure."""
        thorough = measured.budget_s is not None
        return Workload(self.builder.module, self.on_gpu, measured.objective, thorough)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, if no program fails."""
        return self._builder(candidate).plan(self._table(candidate))

    def fingerprint(self, candidate: Candidate) -> str:
        """A digest that is equal for candidates with the same programs."""
        if not candidate.engines:
            return candidate.name
        plan = self.plan(candidate)
        inner = any(is_control_flow(node) for node in plan.nodes)  # bodies may run on any of the engines
        used = sorted(e.key() for e in candidate.engines if inner or e.name in plan.engines)
        return digest(shape_of(plan), str(candidate.rewritten), *used)

    def build(self, candidate: Candidate, deadline: float | None = None, timed: Timed | None = None) -> Built:
        """Build a candidate and compare every program with PyTorch.

        OutOfTime if the `deadline` passes before the last piece. TooSlow if a program answers wrongly and is
        slower than `timed`, so that a repair is not worth its time.
        """
        start = time.perf_counter()
        if not candidate.engines:
            module = self.eager()
            return Built(candidate, module, shape_of(module.plan), time.perf_counter() - start)
        builder = self._builder(candidate, deadline, timed)
        assembly = builder.run(self._table(candidate))
        module = self.finish(assembly, builder)
        error = 0.0 if builder.settings.tolerance is None else self.error(module)
        took = time.perf_counter() - start
        first_s, is_traded, errors = builder.first_s, builder.is_traded, dict(builder.errors)
        return Built(candidate, module, shape_of(assembly.plan), took, first_s, is_traded, error, errors)

    def _builder(
        self, candidate: Candidate, deadline: float | None = None, timed: Timed | None = None
    ) -> Builder:
        pattern, homes = self.builder, candidate.homes
        usual = pattern.settings
        tolerance = usual.tolerance
        if tolerance is not None and not candidate.is_exact:
            tolerance = math.inf  # the whole module is compared instead
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
    """The strategy `base`, which places a node of `homes` on its engine or in PyTorch."""

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
    """The first plans of a search. The first of them is the plan that is used without measurements."""
    *others, pytorch = [engine for engine in engines if engine.is_exact]
    known = {engine.name: engine for engine in others}
    for engine in measured.candidates or ():
        known.setdefault(engine.name, engine)  # an engine that only the candidates name
    alone = [Candidate(name, (engine, pytorch)) for name, engine in known.items()]
    if not workshop.on_gpu:  # on a GPU, such an engine is used without measurements
        alone.sort(key=lambda candidate: candidate.is_slow_to_build)
    line_ups = [*alone[:1], *_in_pytorch(workshop, pytorch, measured), *alone[1:]]
    quick = [engine for engine in others if not engine.slow_to_build]
    if len(quick) < 2:
        return line_ups
    together = Candidate(" > ".join(engine.name for engine in quick), (*quick, pytorch))
    used = [name for name in workshop.plan(together).engines if name != PYTORCH]
    if len(used) < 2:  # one engine accepts every node that another does: the plan is its own
        return sorted(line_ups, key=lambda candidate: candidate.name not in used)
    return [together, *line_ups]


def _in_pytorch(workshop: Workshop, pytorch: Engine, measured: Measured) -> list[Candidate]:
    """The graph in PyTorch, also with PyTorch's other options, and the unchanged model.

    A model that writes to its buffers or inputs is not measured unchanged, since a call would change them.
    """
    if workshop.builder.settings.options.require_full_compilation:
        return []
    graphs = [Candidate(PYTORCH, (pytorch,))]
    for label, variant in pytorch.variants(workshop.workload(measured)):
        graphs.append(Candidate(f"{PYTORCH}, {label}", (variant,), options=1))
    if workshop.builder.module.meta.get("writes"):
        return graphs
    # The option makes the graph win if both are equally fast: its weights are frozen.
    return [*graphs, Candidate("eager", (), options=1)]


def with_other_options(plan: Candidate, workshop: Workshop, measured: Measured) -> list[Candidate]:
    """The plan with each of the other options of its first engine."""
    if not plan.engines:
        return []
    first, *rest = plan.engines
    return [
        replace(plan, name=f"{plan.name}, {label}", engines=(variant, *rest), options=1)
        for label, variant in _variants(first, workshop, measured)
    ]


def _variants(engine: Engine, workshop: Workshop, measured: Measured) -> list[tuple[str, Engine]]:
    """Other options of an engine, each with a label: the user's candidates, or the engine's own proposals."""
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
    """The plan with networks that are not rewritten, if that may make a difference."""
    if not plan.engines or plan.engines[0].name == PYTORCH or plan.is_slow_to_build:
        return []
    if (
        measured.candidates is not None
        or workshop.builder.settings.rewrite is None
        or not workshop.may_vary_patterns
    ):
        return []
    return [replace(plan, name=f"{plan.name}, no patterns", rewritten=False, options=1)]
