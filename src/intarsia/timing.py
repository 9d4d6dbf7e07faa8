"""Peers timed side by side: interleaved rounds in one process, medians, ratios."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds a call took: the median over rounds, the quickest, and every round."""

    median: float
    best: float
    rounds: int
    seconds: tuple[float, ...] = ()


def race(
    peers: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    budget_s: float = 20.0,
    warmup: int = 3,
    least: int = 3,
    pause_s: float = 0.0,
    drop: float = math.inf,
    failed: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Time peers in turn, round by round, so that noise of the machine meets all alike.

    A round that `budget_s` has no more time for does not begin, but for the first `least` ones.
    Fast calls are repeated within a round until they take about 2 ms, so that the clock does not show.
    With `pause_s` every turn begins with a rest: threads of the peer before may spin on for a while.
    Whose quickest round is `drop` times the quickest of all leaves the race. A peer that raises leaves it
    too, and is told in `failed`; without such a table its error is the caller's.

    >>> sorted(race({"a": lambda: None, "b": lambda: sum(range(10))}, rounds=2, warmup=1))
    ['a', 'b']
    """
    began = _now()
    calls, repeats = dict(peers), dict.fromkeys(peers, 0)
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds):
        lap = _now()
        names = list(calls)
        first = number % max(1, len(names))  # who comes first, after a pause, takes turns too
        for name in (*names[first:], *names[:first]):
            try:
                if not repeats[name]:
                    repeats[name] = _repeats(calls[name], warmup)
                time.sleep(pause_s)
                start = _now()
                for _ in range(repeats[name]):
                    calls[name]()
                seconds[name].append((_now() - start) / repeats[name])
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = error
                del calls[name], seconds[name]
        quickest = min((min(seconds[name]) for name in calls), default=0.0)
        calls = {name: call for name, call in calls.items() if min(seconds[name]) <= quickest * drop}
        now = _now()
        if not calls or (number + 1 >= least and now - began + (now - lap) > budget_s):
            break
    return {
        name: Timing(statistics.median(took), min(took), len(took), tuple(took))
        for name, took in seconds.items()
    }


def _repeats(call: Callable[[], object], warmup: int) -> int:
    """How often to call within a round; a call that takes long need not be made to find that out."""
    for _ in range(warmup):
        start = _now()
        call()
        if _now() - start > 0.1:
            return 1
    start = _now()
    call()
    return max(1, min(1000, round(0.002 / max(_now() - start, 1e-7))))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
