"""Peers timed side by side: interleaved rounds in one process, medians, ratios."""

from __future__ import annotations

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
) -> dict[str, Timing]:
    """Time peers in turn, round by round, so that noise of the machine meets all alike.

    When `budget_s` is spent no further round begins, but for the first `least` ones.
    Fast calls are repeated within a round until they take about 2 ms, so that the clock does not show.
    With `pause_s` every turn begins with a rest: threads of the peer before may spin on for a while.

    >>> sorted(race({"a": lambda: None, "b": lambda: sum(range(10))}, rounds=2, warmup=1))
    ['a', 'b']
    """
    repeats: dict[str, int] = {}
    for name, call in peers.items():
        for _ in range(warmup):
            call()
        start = _now()
        call()
        repeats[name] = max(1, min(1000, round(0.002 / max(_now() - start, 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    began = _now()
    for number in range(rounds):
        for name, call in peers.items():
            if pause_s:
                time.sleep(pause_s)
            start = _now()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((_now() - start) / repeats[name])
        if _now() - began > budget_s and number + 1 >= least:
            break
    return {
        name: Timing(statistics.median(took), min(took), len(took), tuple(took))
        for name, took in seconds.items()
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
