"""Who runs in the race that decides, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.choose.findings import Trial
from intarsia.choose.race import is_quick, least_rounds, least_s, nearest, round_s


def _trials(**seconds: float) -> dict[str, Trial]:
    return {name: Trial(name, 1, (took,), build_s=1.0, quickest=took) for name, took in seconds.items()}


@pytest.mark.parametrize(
    ("seconds", "runs", "rounds"),
    [
        ({"a": 0.002, "b": 0.0021, "c": 0.0025}, ["a", "b", "c"], 9),  # 9 rounds of all take no time
        ({"a": 0.24, "b": 0.225, "c": 0.252, "d": 0.256}, ["b", "a"], 4),  # MViT: two are near
        ({"a": 0.1, "b": 0.101, "c": 0.102, "d": 0.103}, ["a", "b", "c", "d"], 4),  # all are near, and quick
        ({"a": 0.1, "b": 0.101, "c": 0.112, "d": 0.113}, ["a", "b"], 9),
        ({"a": 0.22, "b": 0.23, "c": 0.23, "d": 0.24}, ["a", "b", "c"], 4),  # all near: as many as fit
        ({"a": 0.45, "b": 0.46, "c": 0.47, "d": 0.48}, ["a", "b"], 3),  # a pair, so that there is a spread
        ({"a": 2.0, "b": 2.1, "c": 2.2}, ["a", "b"], 1),  # no time for more
    ],
)
def test_where_calls_take_long_the_nearest_have_more_rounds(
    seconds: dict[str, float], runs: list[str], rounds: int
) -> None:
    trials = _trials(**seconds)
    assert nearest(list(seconds), [], trials) == runs
    assert least_rounds(runs, trials) == rounds


@given(st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=8), st.integers(0, 4))
def test_the_best_two_and_all_that_is_new_run_and_slow_races_are_short(took: list[float], new: int) -> None:
    trials = _trials(**{f"p{place}": seconds for place, seconds in enumerate(took)})
    fresh = [f"new{place}" for place in range(new)]
    names = nearest(list(trials), fresh, trials)
    best = sorted(trials, key=lambda name: trials[name].quickest)
    assert names[: len(names) - new] == best[: len(names) - new] and names[len(names) - new :] == fresh
    assert len(names) - new >= min(2, len(took))
    if least_rounds(names, trials) > 1:
        assert is_quick(names, trials) and least_rounds(names, trials) * round_s(names, trials) <= 3.0
    assert least_s([*trials, *fresh], trials) >= round_s(names, trials)


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 1), (5.0, 1), (12.0, 2), (30.0, 4), (600.0, 4)])
def test_slow_plans_have_rounds_out_of_the_budget_that_was_given(budget_s: float, rounds: int) -> None:
    trials = _trials(exact=0.34, other=0.36)
    names = [*trials, "short"]  # built since: it takes as long as the best, until it is known
    assert not is_quick(names, trials)
    assert least_rounds(names, trials, budget_s) == rounds
    took = round_s(names, trials)
    assert least_s(names, trials, budget_s) >= (1 + rounds) * took
