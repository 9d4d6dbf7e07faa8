"""Peers timed side by side: interleaved rounds in one process, medians, ratios."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

PAUSE_S = 0.01  # how long the threads of a pool that was just used may spin on, beside the next peer
_LONG_S = 0.1  # who takes so long need not be called several times for the clock, or to be warm
_ROUNDS, _CHEAP_S = 3, 1.0  # rounds that show a spread are run on a spent budget, too, if they take so little


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
    known_s: Mapping[str, float] | None = None,
    is_decided: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
) -> dict[str, Timing]:
    """Time peers in turn, round by round and each round in another order: noise affects all peers equally.

    A round that `budget_s` has no more time for does not begin, but for the first `least` ones, and the first
    three where a round takes less than a second: so that one disturbance of the machine does not decide.
    Fast calls are repeated within a round until they take about 2 ms, so that the clock does not show.
    With `pause_s` every turn begins with a rest: threads of the peer before may spin on for a while.
    Who takes `drop` times as long as the quickest, by quickest rounds and in most rounds, leaves the race
    after two slow rounds. A long first call, to warm up, counts as one of them if it and the round take
    `drop` squared times as long. A peer that raises leaves the race, too, and is told in `failed`; without
    such a table its error is the caller's. Who is known by `known_s` to take long has been called before,
    which was its first call.
    The race ends before its time once `is_decided` by the rounds of those that still run, three at least.

    >>> sorted(race({"a": lambda: None, "b": lambda: sum(range(10))}, rounds=2, warmup=1))
    ['a', 'b']
    """
    began = _now()
    calls, repeats = dict(peers), dict.fromkeys(peers, 0)
    first_s = dict.fromkeys(peers, 0.0)  # of a first call that took long
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    behind = dict.fromkeys(peers, 0)  # in how many rounds
    dice = random.Random(0)
    for name in peers:  # ahead of the rounds, so that those show the time of a further round
        with _leaving(name, calls, seconds, failed):
            known = (known_s or {}).get(name, 0.0)
            repeats[name], first_s[name] = (1, known) if known > _LONG_S else _repeats(calls[name], warmup)
    for number in range(rounds):
        lap = _now()
        names = list(calls)
        dice.shuffle(names)  # nobody always comes first, or after the same peer, whose threads may spin on
        for name in names:
            with _leaving(name, calls, seconds, failed):
                time.sleep(pause_s)
                start = _now()
                for _ in range(repeats[name]):
                    calls[name]()
                seconds[name].append((_now() - start) / repeats[name])
        running = {name: seconds[name] for name in calls}
        now_quickest = min((seconds[name][-1] for name in calls), default=0.0)
        quickest = min((min(seconds[name]) for name in calls), default=0.0)
        for name in list(calls):
            behind[name] += seconds[name][-1] > now_quickest * drop
            is_told = behind[name] > 1 or min(first_s[name], seconds[name][-1]) > quickest * drop**2
            if is_told and 2 * behind[name] > number + 1 and min(seconds[name]) > quickest * drop:
                del calls[name]
        now = _now()
        enough = least if now - lap > _CHEAP_S else max(least, _ROUNDS)
        if not calls or (number + 1 >= enough and now - began + (now - lap) > budget_s):
            break
        if number + 1 >= _ROUNDS and is_decided is not None and is_decided(running):
            break
    return {
        name: Timing(statistics.median(took), min(took), len(took), tuple(took))
        for name, took in seconds.items()
    }


@contextmanager
def _leaving(
    name: str, calls: dict[str, Any], seconds: dict[str, Any], failed: dict[str, Exception] | None
) -> Iterator[None]:
    """A peer that raises leaves the race, where failures are collected."""
    try:
        yield
    except Exception as error:
        if failed is None:
            raise
        failed[name] = error
        del calls[name], seconds[name]


def _repeats(call: Callable[[], object], warmup: int) -> tuple[int, float]:
    """How often to call within a round; a call that takes long need not be made to find that out.

    And what that call took, 0 where none took long.
    """
    for _ in range(warmup):
        start = _now()
        call()
        if (took := _now() - start) > _LONG_S:
            return 1, took
    start = _now()
    call()
    return max(1, min(1000, round(0.002 / max(_now() - start, 1e-7)))), 0.0


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
