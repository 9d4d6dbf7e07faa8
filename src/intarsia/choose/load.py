"""How a plan is called while it is measured: one call at a time, or by several threads at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

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
