"""Races of plans: how plans are called, which of them run in the last race and how often, and their times.

`Progress` has the time that is left, and `no_room` checks the free memory before another plan is built.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx

from intarsia.build.judge import Example
from intarsia.choose.candidate import Built
from intarsia.choose.findings import Trial, is_decided, winner
from intarsia.choose.measured import Measured, Objective
from intarsia.errors import EngineError
from intarsia.logs import tell
from intarsia.memory import free_bytes
from intarsia.partition import PYTORCH
from intarsia.timing import PAUSE_S, Timing, race

Timed = Callable[[], object]
_CALLS = 4  # of every thread in one burst


def callers() -> int:
    """The number of threads that call at once when throughput is measured."""
    return max(2, torch.get_num_threads())


def race_plans(
    calls: Mapping[str, Timed],
    objective: Objective,
    *,
    rounds: int,
    budget_s: float,
    least: int = 3,
    drop: float = math.inf,
    failed: dict[str, Exception] | None = None,
    known_s: Mapping[str, float] | None = None,
    is_decided: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
) -> dict[str, tuple[float, ...]]:
    """The seconds of every plan in every round; for throughput, the share of one call. See `race`.

    >>> sorted(race_plans({"a": lambda: None}, "throughput", rounds=2, budget_s=1.0))
    ['a']
    """

    def timed(calls: Mapping[str, Timed]) -> dict[str, Timing]:
        return race(
            calls,
            rounds=rounds,
            budget_s=budget_s,
            least=least,
            warmup=1,
            pause_s=PAUSE_S,
            drop=drop,
            failed=failed,
            known_s=known_s,
            is_decided=is_decided,
        )

    with torch.no_grad():
        if objective == "latency":
            timings = timed(calls)
            return {name: timing.seconds for name, timing in timings.items()}
        threads = callers()
        with ThreadPoolExecutor(threads) as pool:
            bursts = {name: _burst(pool, call, threads) for name, call in calls.items()}
            timings = timed(bursts)
        share = 1 / (threads * _CALLS)
        return {name: tuple(took * share for took in t.seconds) for name, t in timings.items()}


def _burst(pool: ThreadPoolExecutor, call: Timed, threads: int) -> Timed:
    def work() -> None:
        with torch.no_grad():  # it applies to one thread
            for _ in range(_CALLS):
                call()

    def burst() -> None:
        for waiting in [pool.submit(work) for _ in range(threads)]:
            waiting.result()

    return burst


SPREAD_ROUNDS = 3  # the fewest rounds that show a spread
_QUICK_S = 3.0  # rounds that take less than this do not count against a budget
_CALM_ROUNDS = 4  # one disturbance of the machine does not decide among so many; among three it would
_SURE_ROUNDS, _SURE_S = 9, 2.0  # this many rounds, if they take no longer
MOST_ROUNDS, _FEWEST_ROUNDS = 20, 5  # of the race that decides, if time allows
_SHARE = 0.2  # of a budget, for a race of slow plans
_NEAR, _PAIR = 1.1, 2  # a race of slow plans has those this near to the fastest, and at least two

Trials = Mapping[str, Trial]


def round_s(names: Sequence[str], trials: Trials) -> float:
    """The estimated time of a round. A plan without a measurement counts as fast as the leader."""
    lead = min(trial.median for trial in trials.values())
    return sum(trials[name].median if name in trials else lead for name in names)


def is_quick(names: Sequence[str], trials: Trials) -> bool:
    """Whether three rounds, which show a spread, take so little time that the budget does not matter."""
    return SPREAD_ROUNDS * round_s(names, trials) < _QUICK_S


def last_rounds(names: Sequence[str], trials: Trials) -> int:
    """The rounds of the race that decides, if there is no budget.

    With 20 rounds, the race took 15 of 52 s of CPU time to compile BERT with sizes that vary.
    """
    return min(max(int(_QUICK_S / round_s(names, trials)), _FEWEST_ROUNDS), MOST_ROUNDS)


def least_rounds(names: Sequence[str], trials: Trials, budget_s: float = 0.0) -> int:
    """The number of rounds that are run on a spent budget, unless one call takes longer than all of it.

    For slow plans, it is the number that fits into a part of the user's budget. With one round, a disturbance
    of the machine could decide the whole search.
    """
    took = round_s(names, trials)
    if not is_quick(names, trials):
        return min(max(int(_SHARE * budget_s / took), 1), _CALM_ROUNDS)
    return min(max(int(_SURE_S / took), min(int(_QUICK_S / took), _CALM_ROUNDS)), _SURE_ROUNDS)


def nearest(leaders: Sequence[str], fresh: Sequence[str], trials: Trials) -> list[str]:
    """The plans that run: new ones, and the leaders or, if calls are slow, those near the fastest.

    Three rounds of two plans tell more than one round of six.
    """
    near = sorted(leaders, key=lambda name: trials[name].quickest)
    while len(near) > _PAIR and _SURE_ROUNDS * round_s([*near, *fresh], trials) > _SURE_S:
        is_near = trials[near[-1]].quickest < trials[near[0]].quickest * _NEAR
        if is_near and _CALM_ROUNDS * round_s([*near, *fresh], trials) < _QUICK_S:
            break
        near.pop()
    return [*near, *fresh]


def least_s(names: Sequence[str], trials: Trials, budget_s: float = 0.0) -> float:
    """The least time of a race of the plans near the fastest, with warm-up and pauses."""
    if not trials:
        return 0.0
    leaders = [name for name in names if name in trials]
    names = nearest(leaders, [name for name in names if name not in trials], trials)
    return (1 + least_rounds(names, trials, budget_s)) * (round_s(names, trials) + PAUSE_S * len(names))


class Progress:
    """The time that a search has spent, and its line on a terminal."""

    def __init__(self, budget_s: float = math.inf) -> None:
        self._began = time.perf_counter()
        self.budget_s = budget_s
        self._best = ""

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self._began

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    @property
    def deadline(self) -> float:
        """The time at which the budget is spent, by `time.perf_counter`."""
        return self._began + self.budget_s

    def tell(self, what: str) -> None:
        """Show what runs now."""
        best = f"; best so far {self._best}" if self._best else ""
        tell(f"{what}{best} (Ctrl-C takes the best)", None if math.isinf(self.budget_s) else self.left_s)

    def best(self, name: str, seconds: float) -> None:
        """Show which plan is the fastest so far."""
        self._best = f"{name}, {seconds * 1e3:.2f} ms"


_COPIES = 2.0  # of the weights: a packed copy, and what building needs


def no_room(module: fx.GraphModule) -> str | None:
    """Why another plan of this graph may need too much memory, in a clause; None if it does not."""
    weights = {id(t): t for t in _constants(module)}
    needs = _COPIES * sum(t.numel() * t.element_size() for t in weights.values())
    free = free_bytes()
    if free is None or needs <= free:
        return None
    return f"it may take {needs / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def _constants(module: fx.GraphModule) -> list[torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [tensor for _, tensor in named if tensor.device.type == "cpu"]


FAR = 1.6  # plans this slow in two rounds leave the race, and no options of them are tried
_LONG_ROUND_S = 1.0  # a round that takes longer runs twice before the race that decides
_AHEAD = 1.03  # another plan's median is faster than the selected plan's by this factor


@dataclass
class Standings:
    """Plans by name: the built ones, their measured times, and the slow ones."""

    measured: Measured
    sample: Example
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
        times = race_plans(call, self.measured.objective, rounds=2, least=1, budget_s=0.0, failed=failed)
        return min(times.get("", (math.inf,)))

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
