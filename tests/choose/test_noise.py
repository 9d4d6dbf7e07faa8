"""Races on a busy machine, with a clock that stumbles: the plan that is kept is the one that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia import timing
from intarsia.choose.findings import Findings, Trial, findings_text, winner

HICCUP = 0.117


@dataclass
class Machine:
    """Time passes only in calls; some of them, by number, and all after `busy_from`, take a hiccup more."""

    hiccups: Sequence[int] = ()
    busy_from: float = math.inf
    now: float = 0.0
    count: int = 0
    made: list[str] = field(default_factory=list)

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            slow = self.count in self.hiccups or self.now >= self.busy_from
            self.now += seconds + HICCUP * slow
            self.count += 1
            self.made.append(name)

        return run

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _kept(machine: Machine, times: dict[str, float], rounds: int, budget_s: float) -> str:
    """Who wins a race as `Search` runs it; the first is the simplest plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_now", lambda: machine.now)
        patch.setattr(timing.time, "sleep", machine.sleep)
        calls = {name: machine.call(name, seconds) for name, seconds in times.items()}
        took = timing.race(calls, rounds=rounds, budget_s=budget_s, least=1, warmup=1, drop=1.6)
    order = list(times)
    return winner([Trial(name, 1 + order.index(name), took[name].seconds) for name in times]).name


@pytest.mark.parametrize("hiccup", range(40))
@pytest.mark.parametrize("times", [{"a": 0.010, "b": 0.020}, {"a": 0.020, "b": 0.010}])
def test_one_hiccup_wherever_it_falls_does_not_decide(hiccup: int, times: dict[str, float]) -> None:
    best = min(times, key=times.__getitem__)
    assert _kept(Machine([hiccup]), times, rounds=5, budget_s=0.0) == best


@pytest.mark.parametrize("busy_from", [0.0, 0.02, 0.05, 0.1, 0.3, 1.0])
def test_a_load_that_begins_during_the_race_favours_nobody_who_left_it(busy_from: float) -> None:
    # b leaves after two rounds; all of a's later ones are slow, and its median is larger than b's.
    assert _kept(Machine(busy_from=busy_from), {"b": 0.014, "a": 0.005}, rounds=20, budget_s=60.0) == "a"


@given(st.sets(st.integers(0, 200), max_size=6), st.permutations([0.010, 0.014, 0.030]))
def test_scattered_hiccups_do_not_decide(hiccups: set[int], times: list[float]) -> None:
    plans = dict(zip("abc", times, strict=True))
    assert plans[_kept(Machine(sorted(hiccups)), plans, rounds=20, budget_s=60.0)] == 0.010


def test_one_slow_round_drops_nobody_for_good() -> None:
    """Mixtral: the best plan met another program's load in its first round, and a worse one was kept."""
    machine = Machine()
    table = {"best": [1.30, 2.60, 1.30, 1.30], "other": [2.01] * 4, "quick": [1.40] * 4}

    def call(name: str) -> Callable[[], None]:
        took = iter(table[name])

        def run() -> None:
            machine.now += next(took)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_now", lambda: machine.now)
        patch.setattr(timing.time, "sleep", machine.sleep)
        calls = {name: call(name) for name in table}
        took = timing.race(calls, rounds=3, budget_s=60.0, warmup=1, drop=1.6)
    assert took["best"].seconds == pytest.approx((2.60, 1.30, 1.30))


def test_a_race_ends_once_it_is_decided_and_three_rounds_are_run() -> None:
    log: list[str] = []
    race = partial(timing.race, rounds=9, warmup=0, is_decided=lambda running: "a" in running)
    assert race({"a": lambda: log.append("a")})["a"].rounds == 3
    assert race({"b": lambda: log.append("b")})["b"].rounds == 9


def test_a_slow_peer_is_dropped_after_one_round_and_a_quick_one_after_two() -> None:
    machine = Machine()
    _kept(machine, {"a": 0.001, "slow": 0.5, "quick": 0.01}, rounds=4, budget_s=60.0)
    # Beside what is called to see how long it takes, which is once if that is long.
    assert (machine.made.count("slow"), machine.made.count("quick")) == (2, 4)


def test_a_busy_last_race_is_told() -> None:
    trials = (
        Trial("a", 1, (0.117, 0.117), build_s=1.0, final=True, quickest=0.001),
        Trial("b", 1, (0.0014,), build_s=1.0),
    )
    text = findings_text(Findings("latency", trials, "a"))
    assert "the machine was busy: its quickest round took 1.000" in text
