"""Times of peers, measured side by side: interleaved rounds in one process."""

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

PAUSE_S = 0.01  # the threads of a pool may spin for so long after a call
_LONG_S = 0.1  # a call that takes longer is neither repeated in a round nor warmed up
_ROUNDS, _SHORT_S = 3, 1.0  # rounds that take less than a second are repeated at least so often


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median over rounds, the best round, and every round."""

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
    """The times of peers, measured in turns: each round calls all, in another order, to share the noise.

    No round starts if `budget_s` has no time for it, except the first `least` rounds, and the first three if
    a round takes less than a second, so that one disturbance of the machine does not decide. Within a round,
    a fast call is repeated for about 2 ms. With `pause_s`, every turn starts with a pause, in which the
    threads of the previous peer stop spinning.

    A peer leaves the race after two slow rounds, if it takes `drop` times as long as the fastest peer, by
    best rounds and in most rounds. A long first call counts as a slow round if the call and the round take
    `drop` squared times as long. A peer that raises leaves the race too, and `failed` gets its error; without
    `failed`, the error is raised. A peer with a long time in `known_s` has been called before, which was
    its first call. After three rounds, the race ends once `is_decided` returns True for the rounds of the
    peers that still run.

    >>> sorted(race({"a": lambda: None, "b": lambda: sum(range(10))}, rounds=2, warmup=1))
    ['a', 'b']
    """
    began = _now()
    calls, repeats = dict(peers), dict.fromkeys(peers, 0)
    first_s = dict.fromkeys(peers, 0.0)  # the seconds of a long first call
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    slow_rounds = dict.fromkeys(peers, 0)
    draw = random.Random(0)
    for name in peers:  # before the rounds, so that these have equal lengths
        with _leaving(name, calls, seconds, failed):
            known = (known_s or {}).get(name, 0.0)
            repeats[name], first_s[name] = (1, known) if known > _LONG_S else _repeats(calls[name], warmup)
    for number in range(rounds):
        lap = _now()
        names = list(calls)
        draw.shuffle(names)  # so that no peer is always first, or after the same peer
        for name in names:
            with _leaving(name, calls, seconds, failed):
                time.sleep(pause_s)
                start = _now()
                for _ in range(repeats[name]):
                    calls[name]()
                seconds[name].append((_now() - start) / repeats[name])
        running = {name: seconds[name] for name in calls}
        best_now = min((seconds[name][-1] for name in calls), default=0.0)
        best = min((min(seconds[name]) for name in calls), default=0.0)
        for name in list(calls):
            slow_rounds[name] += seconds[name][-1] > best_now * drop
            is_slow = slow_rounds[name] > 1 or min(first_s[name], seconds[name][-1]) > best * drop**2
            if is_slow and 2 * slow_rounds[name] > number + 1 and min(seconds[name]) > best * drop:
                del calls[name]
        now = _now()
        enough = least if now - lap > _SHORT_S else max(least, _ROUNDS)
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
    """Remove a peer that raises from the race, and store its error in `failed`."""
    try:
        yield
    except Exception as error:
        if failed is None:
            raise
        failed[name] = error
        del calls[name], seconds[name]


def _repeats(call: Callable[[], object], warmup: int) -> tuple[int, float]:
    """The number of calls within a round, and the seconds of a long call (0 if no call was long).

    After a long call, no further call is made.
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
