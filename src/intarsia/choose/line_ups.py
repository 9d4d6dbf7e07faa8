"""The candidates before any block is looked at: the engines in order, each engine alone, other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intarsia.choose.candidate import Candidate, Workshop
from intarsia.choose.measured import Measured
from intarsia.choose.variants import variants
from intarsia.engines import Engine, Inductor, PyTorch
from intarsia.engines.graph_rewrites import apply_rewrites, image_convolutions, one_row_products, own_copy
from intarsia.engines.inductor import GPU_REWRITES
from intarsia.partition import PYTORCH

_VECTORS = "vector_products"
_IMAGES = ("batch_norms", "channels_last")  # Inductor lays images out so by itself


def line_ups(workshop: Workshop, engines: Sequence[Engine], measured: Measured) -> list[Candidate]:
    """What nobody may lose against; first the plan that would be taken without measuring."""
    *others, pytorch = [engine for engine in engines if engine.is_exact]
    known = {engine.name: engine for engine in others}
    for engine in measured.candidates or ():
        known.setdefault(engine.name, engine)  # an engine that is only named here
    alone = [Candidate(name, (engine, pytorch)) for name, engine in known.items()]
    if not workshop.on_gpu:  # there Inductor is the engine that would be taken without measuring
        alone.sort(key=lambda candidate: candidate.is_slow_to_build)
    found = [*alone[:1], *_in_pytorch(workshop, pytorch), *alone[1:]]
    quick = [engine for engine in others if not engine.slow_to_build]
    if len(quick) < 2:
        return found
    together = Candidate(" > ".join(engine.name for engine in quick), (*quick, pytorch))
    used = [name for name in workshop.plan(together).engines if name != PYTORCH]
    if len(used) < 2:  # one engine takes all that any takes, and its own plan is the same
        return sorted(found, key=lambda candidate: candidate.name not in used)
    return [together, *found]


def _in_pytorch(workshop: Workshop, pytorch: Engine) -> list[Candidate]:
    """The graph in PyTorch, also by faster kernels, since that costs no build; and the model as it is.

    A model that writes to what measuring must not change does not run as it is.
    """
    if workshop.builder.options.require_full_compilation:
        return []
    graphs = [Candidate(PYTORCH, (pytorch,))]
    if one_row_products(workshop.builder.module):
        graphs.append(_rewritten(_VECTORS))
    if not workshop.on_gpu and image_convolutions(workshop.builder.module):
        graphs.append(_rewritten(*_IMAGES))
    if workshop.builder.module.meta.get("writes"):
        return graphs
    # Of two as fast, the graph: its weights are those that were compiled.
    return [*graphs, Candidate("eager", (), options=1)]


def _rewritten(*rewrites: str) -> Candidate:
    return Candidate(f"{PYTORCH}, {rewrites[-1]}", (PyTorch(rewrites=rewrites),), options=1)


def _graph_rewrites(engine: Engine, workshop: Workshop) -> list[str]:
    """The rewrites of graphs that would change what an engine is given, and are worth measuring."""
    module = workshop.builder.module
    if isinstance(engine, PyTorch) and image_convolutions(module):
        return list(_IMAGES)
    if not isinstance(engine, Inductor) or not workshop.on_gpu:
        return []
    counts = apply_rewrites(own_copy(module), GPU_REWRITES)
    return [name for name, count in counts.items() if count]


def with_other_options(plan: Candidate, workshop: Workshop, measured: Measured) -> list[Candidate]:
    """A plan with other options of its first engine."""
    if not plan.engines:
        return []
    first, *rest = plan.engines
    return [
        replace(plan, name=f"{plan.name}, {words}", engines=(other, *rest), options=1)
        for words, other in variants(first, measured, _graph_rewrites(first, workshop))
    ]


def without_patterns(plan: Candidate, workshop: Workshop, measured: Measured) -> list[Candidate]:
    """A plan whose networks stay as they were converted, where that may make a difference."""
    if not plan.engines or plan.engines[0].name == PYTORCH or plan.is_slow_to_build:
        return []
    if measured.candidates is not None or workshop.builder.rewrite is None or not workshop.may_vary_patterns:
        return []
    return [replace(plan, name=f"{plan.name}, no patterns", rewritten=False, options=1)]
