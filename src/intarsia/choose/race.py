"""Races of plans: how they are called, who runs in the last one, and for how many rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from intarsia.choose.findings import Trial
from intarsia.choose.measured import Objective
from intarsia.timing import PAUSE_S, Timing, race

Timed = Callable[[], object]
_CALLS = 4  # of every thread, in one burst


def callers() -> int:
    """How many threads call at once when throughput is measured."""
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
) -> dict[str, tuple[float, ...]]:
    """Seconds of every plan in every round; for throughput, of a call its share of them. See `race`.

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
        with torch.no_grad():  # which every thread has for itself
            for _ in range(_CALLS):
                call()

    def burst() -> None:
        for waiting in [pool.submit(work) for _ in range(threads)]:
            waiting.result()

    return burst


SPREAD_ROUNDS = 3  # show a spread
_QUICK_S = 3.0  # what those may take without asking a budget
_CALM_ROUNDS = 4  # of which a hiccup may spoil one; of three it would decide
_SURE_ROUNDS, _SURE_S = 9, 2.0  # so many if they take no more
_SHARE = 0.2  # of a budget, for a race of slow plans
_NEAR, _PAIR = 1.1, 2  # so near the best, and so many at least, are all that a race of slow plans has

Trials = Mapping[str, Trial]


def round_s(names: Sequence[str], trials: Trials) -> float:
    """About what a round takes; who did not race yet takes what the leader does."""
    lead = min(trial.median for trial in trials.values())
    return sum(trials[name].median if name in trials else lead for name in names)


def is_quick(names: Sequence[str], trials: Trials) -> bool:
    """Whether three rounds, which show a spread, take so little that a budget need not tell."""
    return SPREAD_ROUNDS * round_s(names, trials) < _QUICK_S


def least_rounds(names: Sequence[str], trials: Trials, budget_s: float = 0.0) -> int:
    """Rounds that the rest of a budget does not shorten; but one call may take longer than all of it.

    Of slow plans, those that fit into a part of the budget that was given: a whole search is for nothing if
    one round, in which the machine was busy, decides.
    """
    took = round_s(names, trials)
    if not is_quick(names, trials):
        return min(max(int(_SHARE * budget_s / took), 1), _CALM_ROUNDS)
    return min(max(int(_SURE_S / took), min(int(_QUICK_S / took), _CALM_ROUNDS)), _SURE_ROUNDS)


def nearest(leaders: Sequence[str], fresh: Sequence[str], trials: Trials) -> list[str]:
    """Who runs: those that were built since, and the leaders, or where calls take long those near the best.

    Three rounds of two plans tell more than one of six.
    """
    near = sorted(leaders, key=lambda name: trials[name].quickest)
    while len(near) > _PAIR and _SURE_ROUNDS * round_s([*near, *fresh], trials) > _SURE_S:
        is_near = trials[near[-1]].quickest < trials[near[0]].quickest * _NEAR
        if is_near and _CALM_ROUNDS * round_s([*near, *fresh], trials) < _QUICK_S:
            break
        near.pop()
    return [*near, *fresh]


def least_s(names: Sequence[str], trials: Trials, budget_s: float = 0.0) -> float:
    """What a race of those nearest to the best takes at least, its warm-up and pauses included."""
    if not trials:
        return 0.0
    leaders = [name for name in names if name in trials]
    names = nearest(leaders, [name for name in names if name not in trials], trials)
    return (1 + least_rounds(names, trials, budget_s)) * (round_s(names, trials) + PAUSE_S * len(names))
