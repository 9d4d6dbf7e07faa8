"""Schedules: valid, optimal for two colours, never above first fit for more."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.partition.schedule import Problem, Runs, alternate, fewest, first_fit, in_order

SCHEDULES = [in_order, first_fit, fewest]


@st.composite
def problems(draw: st.DrawFn, colours: int, units: int = 9, alone: bool = False) -> Problem:
    size = draw(st.integers(0, units))
    density = draw(st.sampled_from([1, 2, 4]))
    chosen = []
    for unit in range(size):
        colour = draw(st.integers(-1 if alone else 0, colours - 1))
        chosen.append(colour if colour >= 0 else -1 - unit)
    before = []
    for unit in range(size):
        earlier = draw(st.lists(st.integers(0, unit - 1), max_size=density, unique=True)) if unit else []
        before.append(sorted(earlier))
    return Problem(chosen, before)


def optimum(problem: Problem) -> int:
    """The fewest runs over all orders, by a search through every set of finished units."""
    everything = (1 << len(problem)) - 1
    needs = [sum(1 << earlier for earlier in before) for before in problem.before]
    start = (0, None)
    cost = {start: 0}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        done, last = state
        if done == everything:
            return cost[state]
        for unit, colour in enumerate(problem.colours):
            if done >> unit & 1 or needs[unit] & ~done:
                continue
            same = colour == last and colour >= 0
            following = (done | 1 << unit, colour)
            price = cost[state] + (not same)
            if price < cost.get(following, len(problem) + 1):
                cost[following] = price
                (queue.appendleft if same else queue.append)(following)
    raise AssertionError("no order found")


def check(problem: Problem, runs: Runs) -> None:
    assert sorted(unit for run in runs for unit in run) == list(range(len(problem)))
    level = {unit: number for number, run in enumerate(runs) for unit in run}
    for unit, before in enumerate(problem.before):
        assert all(level[earlier] <= level[unit] for earlier in before)
    for run in runs:
        assert run == sorted(run)
        assert len({problem.colours[unit] for unit in run}) == 1
        assert len(run) == 1 or problem.colours[run[0]] >= 0


@settings(max_examples=500, deadline=None)
@given(problems(colours=2))
def test_two_colours_reach_the_optimum(problem: Problem) -> None:
    runs = alternate(problem)
    check(problem, runs)
    assert len(runs) == optimum(problem)
    assert len(fewest(problem)) == len(runs)


@settings(max_examples=600, deadline=None)
@given(problems(colours=4, units=14, alone=True))
def test_more_colours_are_valid_and_never_above_first_fit(problem: Problem) -> None:
    for schedule in SCHEDULES:
        check(problem, schedule(problem))
    assert len(fewest(problem)) <= min(len(first_fit(problem)), len(in_order(problem)))


def test_three_colours_are_mostly_optimal() -> None:
    chance = random.Random(1)
    best, first = 0, 0
    for _ in range(300):
        size = chance.randint(4, 10)
        before = [sorted(chance.sample(range(unit), min(unit, chance.randint(0, 2)))) for unit in range(size)]
        problem = Problem([chance.randrange(3) for _ in range(size)], before)
        least = optimum(problem)
        best += len(fewest(problem)) == least
        first += len(first_fit(problem)) == least
    assert best >= 285 > first


@pytest.mark.parametrize("schedule", [*SCHEDULES, alternate])
def test_nothing_to_schedule(schedule) -> None:
    assert schedule(Problem([], [])) == []


def test_lone_units_share_their_run_with_nothing() -> None:
    problem = Problem([0, -2, 0, -4, 0], [[], [], [], [], []])
    assert sorted(map(len, fewest(problem))) == [1, 1, 3]
