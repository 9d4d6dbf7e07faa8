"""The choice of the plan that measured fastest, for a model's graph and the installed engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from intarsia.build.judge import Example
from intarsia.cache.machine import digest
from intarsia.choose.blocks import blocks_at
from intarsia.choose.candidate import (
    Candidate,
    Workshop,
    line_ups,
    with_other_options,
    without_patterns,
)
from intarsia.choose.findings import Findings, measured_plan, winner
from intarsia.choose.measured import Measured
from intarsia.choose.memory import Memory, contents, key_of
from intarsia.choose.mixes import mix, shortened
from intarsia.choose.race import Progress
from intarsia.choose.search import Search
from intarsia.engines import Engine
from intarsia.errors import IntarsiaError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.weights import tensor_digest


def choose(
    measured: Measured,
    workshop: Workshop,
    engines: Sequence[Engine],
    sample: Example,
    context: str = "",
    tolerance: float | None = None,
) -> Compiled:
    """The fastest module on this machine. A stored search of an earlier compile is not repeated.

    `context` has everything that programs depend on besides graph, engines and options.
    """
    engines = [engine.for_objective(measured.objective) for engine in engines]
    memory = Memory()
    sizes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in sample.inputs]
    pattern = workshop.builder
    settings = f"{pattern.settings.options} {measured.objective} {len(pattern.examples)} {tolerance}"
    context = f"{settings} {sizes} {context}"
    if tolerance is not None:
        context = f"{context} {_values(workshop)}"  # errors depend on weights and examples
    key = _key(measured, workshop, engines, context)
    known = memory.findings(key)
    if known is not None and (known.complete or (measured.budget_s or 0.0) <= known.budget_s):
        module = _again(known, measured, workshop, engines)
        if module is not None:
            return _with_findings(module, replace(known, remembered=True))
    search = Search(measured, workshop, engines, sample, memory, Progress(), context, tolerance)
    built, findings = search.run()
    if not search.interrupted:
        memory.keep_findings(key, findings)
    return _with_findings(built.module, findings)


def _again(
    known: Findings, measured: Measured, workshop: Workshop, engines: Sequence[Engine]
) -> Compiled | None:
    """The fastest plan of an earlier search, built again; None if it differs from the measured one."""
    final = [trial for trial in known.trials if trial.final] or list(known.trials)
    if winner(final, usual=known.trials[0].name).name != known.chosen:
        return None  # the findings are damaged, or another version decided
    trial = known.trial(known.chosen)
    try:
        candidate = _candidate(known, measured, workshop, engines)
        if candidate is None:
            return None
        built = workshop.build(candidate)
    except IntarsiaError:  # a new search reports it
        return None
    if built.shape != trial.shape or (known.tolerance is not None and built.error > known.tolerance):
        return None
    return built.module


def _candidate(
    known: Findings, measured: Measured, workshop: Workshop, engines: Sequence[Engine]
) -> Candidate | None:
    trial = known.trial(known.chosen)
    if trial.blocks:
        quick = [engine for engine in engines if not engine.slow_to_build]
        blocks = blocks_at(workshop.builder.module, [block.place for block in known.blocks[1:]])
        used = [e for e in quick if e.is_exact or e.name in trial.blocks]
        return mix(blocks, used, trial.blocks)
    every = line_ups(workshop, engines, measured)
    for plain in list(every):
        every += with_other_options(plain, workshop, measured) + without_patterns(plain, workshop, measured)
    every += shortened(workshop.builder.module, engines)
    return next((candidate for candidate in every if candidate.name == trial.name), None)


def _key(measured: Measured, workshop: Workshop, engines: Sequence[Engine], context: str) -> str:
    candidates = [*engines, *(measured.candidates or ())]
    options = "usual" if measured.candidates is None else "given"
    return key_of(contents(workshop.builder.module), candidates, context, options)


def _values(workshop: Workshop) -> str:
    """A digest of all weights and examples."""
    state = workshop.builder.module.state_dict().values()
    tensors = [x for example in workshop.builder.examples for x in example]
    return digest(*(tensor_digest(x) if isinstance(x, torch.Tensor) else repr(x) for x in (*state, *tensors)))


def _with_findings(module: Compiled, findings: Findings) -> Compiled:
    module.plan = measured_plan(module.plan, findings)
    return module
