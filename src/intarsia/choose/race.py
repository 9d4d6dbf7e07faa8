"""Races of plans: how plans are called, which of them run in the last race, and for how many rounds.

`Progress` has the time that is left, and `no_room` checks the free memory before another plan is built.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import fx

from intarsia.choose.findings import Trial
from intarsia.choose.measured import Objective
from intarsia.logs import tell
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
_CGROUP = Path("/sys/fs/cgroup")


def no_room(module: fx.GraphModule) -> str | None:
    """Why another plan of this graph may need too much memory, in a clause; None if it does not."""
    weights = {id(t): t for t in _constants(module)}
    needs = _COPIES * sum(t.numel() * t.element_size() for t in weights.values())
    free = free_bytes()
    if free is None or needs <= free:
        return None
    return f"it may take {needs / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def free_bytes() -> int | None:
    """The memory that this process may still use, on Linux; None on other systems."""
    limits = [value for value in (_available(), _left_to_group()) if value is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def _left_to_group() -> int | None:
    """The memory that is left of a container's limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit ("max"), no such file
        return None


def _constants(module: fx.GraphModule) -> list[torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [tensor for _, tensor in named if tensor.device.type == "cpu"]
