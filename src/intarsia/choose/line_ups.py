"""The candidates before any block is looked at: the engines in order, each engine alone, other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intarsia.choose.candidate import Candidate, Workshop
from intarsia.choose.measured import Measured
from intarsia.engines import Engine
from intarsia.partition import PYTORCH


def line_ups(workshop: Workshop, engines: Sequence[Engine], measured: Measured) -> list[Candidate]:
    """What nobody may lose against; first the plan that would be taken without measuring."""
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
    if workshop.builder.options.require_full_compilation:
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
    if measured.candidates is not None or workshop.builder.rewrite is None or not workshop.may_vary_patterns:
        return []
    return [replace(plan, name=f"{plan.name}, no patterns", rewritten=False, options=1)]
