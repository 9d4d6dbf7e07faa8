"""Standings: the plans that a search has built, their measured times, and the races between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from intarsia.choose.candidate import Built, Sample
from intarsia.choose.findings import Trial, is_decided, winner
from intarsia.choose.measured import Measured
from intarsia.choose.race import (
    MOST_ROUNDS,
    SPREAD_ROUNDS,
    Progress,
    is_quick,
    last_rounds,
    least_rounds,
    race_plans,
)
from intarsia.errors import EngineError
from intarsia.partition import PYTORCH

FAR = 1.6  # plans this slow in two rounds leave the race, and no options of them are tried
_LONG_ROUND_S = 1.0  # a round that takes longer runs twice before the race that decides
_AHEAD = 1.03  # another plan's median is faster than the selected plan's by this factor


@dataclass
class Standings:
    """Plans by name: the built ones, their measured times, and the slow ones."""

    measured: Measured
    sample: Sample
    progress: Progress
    built: dict[str, Built] = field(default_factory=dict, init=False)
    trials: dict[str, Trial] = field(default_factory=dict, init=False)
    behind: set[str] = field(default_factory=set, init=False)  # plans that do not run in the last race
    left_out: list[str] = field(default_factory=list, init=False)  # what was not measured, with reasons
    complete: bool = field(default=True, init=False)  # whether a larger budget would measure nothing more

    def last_race(self, names: Sequence[str]) -> None:
        """Run the race that decides, and a second one if another plan may be faster than the selected one.

        That may be a dropped plan, if the machine was busy. Otherwise it is a plan that is ahead in the
        median, but did not win three of four rounds.
        """
        rounds = MOST_ROUNDS if self.measured.budget_s else last_rounds(names, self.trials)
        self.race(names, final=True, rounds=rounds, share=0.2)
        leader = self.trials[self.leader()]
        standing = [trial for trial in self.trials.values() if trial.name in self.built]
        again = [trial.name for trial in standing if trial.final or self._may_beat(trial, leader)]
        if all(self.trials[name].final for name in again):
            ahead = (t.name for t in standing if t.final and t.median * _AHEAD < leader.median)
            again = [leader.name, *ahead]
        if len(again) > 1 and self.fits_a_race(again):
            # Rounds of different races are not compared.
            self.trials = {name: replace(trial, final=False) for name, trial in self.trials.items()}
            self.race(again, final=True, rounds=rounds, share=0.2)

    def fits_a_race(self, names: Sequence[str]) -> bool:
        """Whether there is time for three more rounds, or they are short and needed to show a spread."""
        took = SPREAD_ROUNDS * sum(self.trials[name].median for name in names)
        shown = min(len(self.trials[name].seconds) for name in names) >= SPREAD_ROUNDS
        return took < self.progress.left_s or (not shown and is_quick(names, self.trials))

    def quickest_call(self, built: Built) -> float:
        """The approximate seconds of a call; infinite if it fails."""
        call, failed = {"": built.call(self.sample)}, dict[str, Exception]()
        race = race_plans(call, self.measured.objective, rounds=2, least=1, budget_s=0.0, failed=failed)
        return min(race.get("", (math.inf,)))

    def race(self, names: Sequence[str], *, final: bool, rounds: int, share: float) -> None:
        """Measure plans end to end, in turns."""
        self.progress.tell(f"measuring {', '.join(names)}")
        calls = {name: self.built[name].call(self.sample) for name in names}
        left = max(self.progress.left_s, 0.0)
        budget = min(self.progress.budget_s * share, left) if self.measured.budget_s else left / 2
        known_s, failed = self._known_s(names), dict[str, Exception]()
        if not final and not self.measured.budget_s and sum(known_s.values()) > _LONG_ROUND_S:
            rounds = 2  # the last race decides; with three, this one was a fifth of GPT-2's compile
        took = race_plans(
            calls,
            self.measured.objective,
            rounds=rounds,
            least=least_rounds(names, self.trials, self.measured.budget_s or 0.0) if final else 1,
            budget_s=budget,
            drop=FAR,
            failed=failed,
            known_s=known_s,
            is_decided=partial(self._is_decided, rounds) if final else None,
        )
        for name, error in failed.items():
            self.left_out.append(f"{name}: it failed during measurement: {type(error).__name__}: {error}")
            del self.built[name]
            self.trials.pop(name, None)
        if not took:
            raise EngineError(f"every plan failed during measurement: {'; '.join(self.left_out)}")
        for name, seconds in took.items():
            before = self.trials.get(name)
            self.trials[name] = self.built[name].trial(seconds, final=final, before=before)
        lead = min(took, key=lambda name: self.trials[name].median)
        self.progress.best(lead, self.trials[lead].median)

    def _known_s(self, names: Sequence[str]) -> dict[str, float]:
        """What a call of a plan has taken: in an earlier race, or when answers were compared."""
        known = {name: self.trials[name].quickest for name in names if name in self.trials}
        # On a GPU, a first call loads and compiles kernels, so it is no measurement: Inductor's plan of GPT-2
        # was dropped for a first call of 66 ms, where it runs in 2.5 (H200).
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in self.sample.inputs)
        if self.measured.objective == "latency" and not on_gpu:
            compared = {name: self.built[name].first_s for name in names}
            as_it_is = [n for n in names if n == PYTORCH or not self.built[n].candidate.engines]
            known = {**compared, **dict.fromkeys(as_it_is, self.sample.eager_s), **known}
        return known

    def _is_decided(self, rounds: int, took: Mapping[str, Sequence[float]]) -> bool:
        trials = [self.built[name].trial(tuple(seconds), final=True) for name, seconds in took.items()]
        return is_decided(trials, rounds, usual=next(iter(self.trials)))

    def close(self, times: float) -> list[str]:
        """The plans whose fastest round is within `times` the best, in order. A median needs more rounds."""
        standing = (trial for trial in self.trials.values() if trial.name in self.built)
        ranked = sorted(standing, key=lambda trial: min(trial.seconds))
        limit = min(ranked[0].seconds) * times
        return [trial.name for trial in ranked if min(trial.seconds) <= limit]

    def _may_beat(self, trial: Trial, leader: Trial) -> bool:
        """Whether a dropped plan may be faster: its fastest round is, and is near the fastest of all."""
        best = min(other.quickest for other in self.trials.values())
        return trial.quickest < min(leader.median, FAR * best)

    @property
    def near(self) -> dict[str, Built]:
        """The built plans without those far behind."""
        return {name: built for name, built in self.built.items() if name not in self.behind}

    def leader(self) -> str:
        """The name of the plan that the measurements select so far. After the last race, only that counts."""
        decided = [trial for trial in self.trials.values() if trial.final]
        measured = [trial for trial in decided or self.trials.values() if trial.name in self.built]
        if not measured:
            return next(iter(self.built))
        return winner(measured, usual=next(iter(self.trials))).name

    def leave_out(self, reason: str) -> None:
        """Note why something was not measured, which a larger budget would measure."""
        self.left_out.append(reason)
        self.complete = False
