"""The search for the fastest plan: engines alone, options, mixes of blocks, and the race that decides."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from intarsia.build.builder import Timed
from intarsia.build.judge import Example
from intarsia.choose.blocks import Blocks, blocks_at, find_blocks, is_repetitive
from intarsia.choose.candidate import (
    Built,
    Candidate,
    Workshop,
    line_ups,
    with_other_options,
    without_patterns,
)
from intarsia.choose.findings import BlockCost, Findings
from intarsia.choose.measured import Measured
from intarsia.choose.memory import Memory
from intarsia.choose.mixes import Costing, block_error, mix, promising_mixes, shortened, with_exact_blocks
from intarsia.choose.race import FAR, Progress, Standings, least_s, nearest, no_room
from intarsia.engines import Engine
from intarsia.engines.building import OutOfTime
from intarsia.errors import IntarsiaError, first_line
from intarsia.partition import PYTORCH
from intarsia.quantized import has_packed_weights
from intarsia.runtime.weights import large_weights, release_memory

SLOW_BUILD_S = 60.0  # the time that an engine which is slow to build may take
_BLOCKS = (12, 6, 3)  # the most blocks of a graph; fewer if time is short
_RESERVE = 0.3  # the part of the budget for building mixes and for the last race
_RACE_S = 0.1  # of one block on one engine
_MIXES = 3  # that are built
_CLOSE = 1.3  # plans slower than this after the first race do not run in the last
_NEAR = 1.1  # and without a budget, plans slower than this are not tried without patterns
_TO_RELEASE = 5  # rounds, after which the slower plan is released
_AGAIN = 1.7  # without a budget, measuring may take this many times the time of the first plan


@dataclass
class Search:
    """The state of one search."""

    measured: Measured
    workshop: Workshop
    engines: Sequence[Engine]  # PyTorch last
    sample: Example
    memory: Memory
    progress: Progress
    context: str = ""  # everything that programs depend on besides graph, engines and options
    tolerance: float | None = None  # the largest error of results; None for exact arithmetic
    build_s: dict[tuple[str, ...], float] = field(default_factory=dict, init=False)  # by engines
    blocks: tuple[BlockCost, ...] = field(default=(), init=False)
    entering: dict[str, float] = field(default_factory=dict, init=False)
    errors: list[IntarsiaError] = field(default_factory=list, init=False)
    interrupted: bool = field(default=False, init=False)
    _planned: set[str] = field(default_factory=set, init=False)  # fingerprints of built plans

    def __post_init__(self) -> None:
        self.plans = Standings(self.measured, self.sample, self.progress)
        # Weights in few bits save memory, and every program has a copy of them.
        module = self.workshop.builder.module
        is_exact = self.tolerance is None
        self._holds_one = is_exact and has_packed_weights(module) and bool(large_weights(module))

    def run(self) -> tuple[Built, Findings]:
        """The fastest plan that was built, verified and measured, and the findings."""
        try:
            self._search()
        except KeyboardInterrupt:
            if not self.plans.built:
                raise
            self.interrupted = True
            self.plans.leave_out("what was not measured when the search was interrupted")
        chosen = self.plans.leader()
        return self.plans.built[chosen], self._findings(chosen)

    def _search(self) -> None:
        first, *others = line_ups(self.workshop, self.engines, self.measured)
        # With a tolerance, shorter arithmetic is tried before an engine that may take all the time.
        later = [other for other in others if self.tolerance is not None and other.is_slow_to_build]
        self._build_all([first, *(other for other in others if other not in later)])
        if not self.plans.built:
            raise self.errors[0]
        rounds = 5 if self.measured.budget_s else 3  # enough to show which plans may win the last race
        self.plans.race(list(self.plans.built), final=False, rounds=rounds, share=0.15)
        leaders = self.plans.close(_CLOSE)
        variants = self._variants(leaders)
        self.plans.behind = self.plans.built.keys() - set(leaders)
        fresh = self._shortened(leaders[0]) + self._build_all(later)
        fresh += self._build_all(variants)
        fresh += self._build_all(self._mixes())
        leaders, fresh = ([n for n in names if n in self.plans.built] for names in (leaders, fresh))
        last = nearest(leaders, fresh, self.plans.trials)
        if len(last) > 1 and (fresh or self.plans.fits_a_race(last)):
            self.plans.last_race(last)
        else:
            trials = self.plans.trials
            trials |= {name: replace(trials[name], final=True) for name in leaders or fresh}

    def _variants(self, leaders: Sequence[str]) -> list[Candidate]:
        """Other options of all plans that these may make the fastest; then the leaders without patterns.

        Options can gain more than `_CLOSE`: without spinning threads, each step of a recurrent layer is
        slower.
        """
        candidates = {name: built.candidate for name, built in self.plans.built.items()}
        variants = [
            other
            for name in self.plans.close(FAR)
            for other in with_other_options(candidates[name], self.workshop, self.measured)
        ]
        # Patterns are applied only if they are faster, so leaving them out gains little.
        near = [name for name in self.plans.close(_NEAR) if self.plans.built[name].is_traded]
        for name in leaders if self.measured.budget_s else near:
            variants += without_patterns(candidates[name], self.workshop, self.measured)
        return variants

    def _limit(self) -> None:
        """Set the budget after the first plan was built, when the time of a compile is known."""
        if not math.isinf(self.progress.budget_s):
            return
        if self.measured.budget_s is None:
            took = time.perf_counter() - self.workshop.began
            self.progress.budget_s = self.progress.spent_s + _AGAIN * took
        else:
            self.progress.budget_s = self.measured.budget_s

    def _mixes(self) -> list[Candidate]:
        """Mixes that may be faster than any plan so far, by the costs of blocks."""
        if self.workshop.on_gpu:  # one CUDA graph runs the whole model, so times of single blocks say little
            return []
        quick = [engine for engine in self.engines if engine.is_exact and not engine.slow_to_build]
        blocks = self._affordable_blocks(len(quick))
        if len(quick) < 2 or blocks is None:
            return []
        full = self.workshop.builder.settings.options.require_full_compilation
        able = [engine for engine in quick if not (full and engine.name == PYTORCH)]
        costing = Costing(self.workshop, able, self.measured.objective, self.memory, self.context)
        self.progress.tell("measuring crossings")
        self.entering = costing.entering()
        costs = costing.costs(blocks, self.sample.inputs, self._enough)
        if costs is None:
            self.plans.leave_out(f"mixes: blocks took more than their part of the budget of {self._budget}")
            return []
        self.blocks = costs
        median = {name: trial.median for name, trial in self.plans.trials.items()}
        alone = {engine.name: median[engine.name] for engine in quick if engine.name in median}
        ways = promising_mixes(costs, self.entering, alone, min(median.values()), _MIXES)
        return [mix(blocks, quick, way) for way in ways]

    def _shortened(self, lead: str) -> list[str]:
        """Plans in shorter arithmetic whose error is within the tolerance."""
        if self.tolerance is None:
            return []
        fitting = []
        for candidate in shortened(self.workshop.builder.module, self.engines):
            for name in self._build_all([candidate]):
                built = self.plans.built[name]
                if self._is_close_enough(name):
                    fitting.append(name)
                    continue
                took, exact = self.plans.quickest_call(built), self.plans.trials[lead].quickest
                if took <= exact:
                    fitting += self._with_exact_blocks(candidate.engines[0], lead)
                else:
                    slower = f"all of it takes {took * 1e3:.3g} ms, and {lead} {exact * 1e3:.3g}"
                    self.plans.left_out.append(f"{name}, some blocks exact: {slower}")
        return fitting

    def _is_close_enough(self, name: str) -> bool:
        assert self.tolerance is not None
        error = self.plans.built[name].error
        if error <= self.tolerance:
            return True
        self.plans.left_out.append(f"{name}: its error is {error:.2g}, and tolerance={self.tolerance:g}")
        del self.plans.built[name]
        return False

    def _with_exact_blocks(self, short: Engine, lead: str) -> list[str]:
        """The short engine, with as few of its worst blocks as necessary on the leading exact engine."""
        blocks = self._affordable_blocks(1)
        exact = next((e for e in self.plans.built[lead].candidate.engines if e.is_exact), self.engines[-1])
        if blocks is None:
            return []
        block_inputs = blocks.values(self.sample.inputs)
        errors: list[float] = []
        for number in range(len(blocks)):
            if self._enough(f"the error of block {number} of {len(blocks)} on {short.name}"):
                self.plans.leave_out(
                    f"{short.name}, some blocks exact: errors of blocks do not fit {self._budget}"
                )
                return []
            errors.append(block_error(self.workshop, blocks, number, short, block_inputs[number]))
        self.blocks = self.blocks or tuple(blocks.untimed())
        count = 1
        while count < len(blocks):
            candidate = with_exact_blocks(blocks, errors, short, exact, count, self.engines)
            for name in self._build_all([candidate]):
                if self._is_close_enough(name):
                    return [name]
            count *= 2
        return []

    def _affordable_blocks(self, engines: int) -> Blocks | None:
        """Blocks as small as the remaining time allows; None without waists, or without time."""
        builder = self.workshop.builder
        if self.blocks:  # findings have the blocks of one cut
            return blocks_at(builder.module, [block.place for block in self.blocks[1:]])
        # In a network of equal layers, the same engine is the fastest in each. Measuring blocks took 7 of the
        # 57 s of CPU time for DistilBERT with sizes that vary.
        if self.measured.budget_s is None and engines > 1 and is_repetitive(builder.module):
            self.plans.leave_out(
                "mixes: one engine leads in a network of equal layers; a budget measures its blocks"
            )
            return None
        left = self.progress.left_s - _RESERVE * self.progress.budget_s
        whole = (sum if engines > 1 else max)(self.build_s.values())
        for most in _BLOCKS:
            blocks = find_blocks(builder.module, builder.settings.options.atomic, most)
            if blocks is None:
                return None
            needs = whole * blocks.share
            if needs + len(set(blocks.digests)) * engines * _RACE_S < left:
                return blocks
            if needs >= left:  # larger blocks are equal more rarely, and take no less
                break
        self.plans.leave_out(f"mixes: measuring blocks does not fit into what is left of {self._budget}")
        return None

    def _enough(self, what: str) -> bool:
        self.progress.tell(f"measuring {what}")
        return self.progress.left_s < _RESERVE * self.progress.budget_s

    @property
    def _budget(self) -> str:
        return f"{self.progress.budget_s:.3g} s"

    def _build_all(self, candidates: Sequence[Candidate]) -> list[str]:
        """Build the candidates that fit the budget and differ from built ones; returns their names."""
        names = []
        for candidate in candidates:
            if candidate.name in self.plans.trials:  # a line-up may have been measured with options already
                continue
            favoured = self._is_favoured(candidate)
            if self.plans.built and (reason := self._too_late(candidate)):
                self.plans.leave_out(f"{candidate.name}: {reason}")
                continue
            if self._holds_one and candidate.has_programs:
                self._release_slower()
            self.progress.tell(f"building {candidate.name}")
            try:
                planned = self.workshop.fingerprint(candidate)
                if planned in self._planned:
                    continue
                self._planned.add(planned)
                limit = self.progress.deadline if self.plans.built and not favoured else None
                built = self.workshop.build(candidate, limit, self._timed())
            except OutOfTime as error:
                self.plans.leave_out(f"{candidate.name}: {error}")
                continue
            except IntarsiaError as error:  # such as require_full_compilation, which this plan cannot meet
                self.errors.append(error)
                self.plans.left_out.append(f"{candidate.name}: {first_line(error)}")
                continue
            self.plans.built[candidate.name] = built
            if self._holds_one:
                release_memory(self.workshop.builder.module)
            if not candidate.is_slow_to_build:  # its time says nothing about the others
                self.build_s[candidate.engine_names] = built.build_s
            names.append(candidate.name)
            self._limit()
            if favoured:  # its time is not subtracted from the others
                self.progress.budget_s += built.build_s
            del built  # it may be released
        return names

    def _release_slower(self) -> None:
        """Measure the plans that are in memory, and release all except the fastest."""
        if len(self.plans.built) > 1:
            self.plans.race(list(self.plans.built), final=False, rounds=_TO_RELEASE, share=0.15)
            self.plans.built = {name: self.plans.built[name] for name in [self.plans.leader()]}
            gc.collect()
        release_memory(self.workshop.builder.module)

    def _timed(self) -> Timed | None:
        """The sample, and the time on it that a plan with a wrong answer must not exceed."""
        numbers = [
            n for n, inputs in enumerate(self.workshop.builder.examples) if inputs is self.sample.inputs
        ]
        if not numbers:
            return None
        near = self.plans.near.values
        return Timed(numbers[0], lambda: min(map(self.plans.quickest_call, near()), default=math.inf))

    def _is_favoured(self, candidate: Candidate) -> bool:
        """Whether it is built regardless of time, since no budget is set and it is known to be faster."""
        if self.measured.budget_s is not None or not candidate.is_slow_to_build:
            return False
        workload = self.workshop.workload(self.measured)
        return any(engine.is_known_to_pay(workload) for engine in candidate.engines)

    def _too_late(self, candidate: Candidate) -> str | None:
        left = self.progress.left_s
        if self._is_favoured(candidate):
            return self._no_room()
        if candidate.is_slow_to_build:
            if self.measured.budget_s is None and not self.workshop.on_gpu:
                return "it is slow to build, and tried only with a budget, such as Measured(budget_s=120)"
            if left < SLOW_BUILD_S and self.measured.budget_s is not None:
                return (
                    f"it may take {SLOW_BUILD_S:g} s to build, and of the budget of"
                    f" {self._budget} {max(left, 0):.0f} s are left"
                )
        if left <= 0:
            return f"the budget of {self._budget} is spent"
        needs = self._expected_build_s(candidate) if candidate.has_programs else 0.0
        if candidate.has_programs and (reason := self._no_room()) is not None:
            return reason
        needs += least_s([*self.plans.near, candidate.name], self.plans.trials, self.measured.budget_s or 0.0)
        if left < needs:
            took = f"it may take {needs:.1f} s to build and to race"
            return f"{took}, and {left:.1f} s are left of {self._budget}"
        return None

    def _expected_build_s(self, candidate: Candidate) -> float:
        """The build time of its engines with other options, or else of any engine, which differ little."""
        return self.build_s.get(candidate.engine_names) or max(self.build_s.values(), default=0.0)

    def _no_room(self) -> str | None:
        """Why another plan may need too much memory, after the programs of slow plans were released.

        Each may have a copy of the weights. They are released only if necessary, since a plan may be slow
        because the machine was busy: of Mixtral, the fastest plan (1.30 s) was dropped, and one of 2.01 s
        selected.
        """
        reason = no_room(self.workshop.builder.module)
        if reason is None or not self.plans.behind & self.plans.built.keys():
            return reason
        self.plans.built = self.plans.near
        return no_room(self.workshop.builder.module)

    def _findings(self, chosen: str) -> Findings:
        return Findings(
            self.measured.objective,
            tuple(self.plans.trials.values()),
            chosen,
            self.blocks,
            self.entering,
            tuple(self.plans.left_out),
            self.progress.budget_s,
            self.progress.spent_s,
            self.plans.complete,
            self.tolerance,
            self.plans.built[chosen].errors,
        )
