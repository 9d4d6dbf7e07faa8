"""Cuts against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import PartitionError
from intarsia.pipeline.split import choose_cuts


def loads(weights, cuts, speeds):
    bounds = [0, *cuts, len(weights)]
    return [sum(weights[a:b]) / s for (a, b), s in zip(pairwise(bounds), speeds, strict=True)]


@st.composite
def problems(draw):
    n = draw(st.integers(2, 9))
    weights = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    crossing = draw(st.lists(st.integers(0, 9), min_size=n + 1, max_size=n + 1))
    allowed = sorted(draw(st.sets(st.integers(1, n - 1), min_size=1)))
    stages = draw(st.integers(1, len(allowed) + 1))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=stages, max_size=stages))
    slack = draw(st.sampled_from([0.0, 0.5]))
    return weights, crossing, allowed, stages, speeds, slack


@given(problems())
@settings(deadline=None, max_examples=150)
def test_best_balance_then_fewest_bytes(problem):
    weights, crossing, allowed, stages, speeds, slack = problem
    every = list(combinations(allowed, stages - 1))
    best = min(max(loads(weights, c, speeds)) for c in every)
    near = [c for c in every if max(loads(weights, c, speeds)) <= best * (1 + slack) + 1e-9]
    cheapest = min(sum(crossing[i] for i in c) for c in near)
    cuts = choose_cuts(weights, crossing, allowed, stages, slack=slack, speeds=speeds)
    assert tuple(cuts) in near
    assert sum(crossing[i] for i in cuts) == cheapest


@given(problems(), st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_memory_caps_hold(problem, cap):
    weights, crossing, allowed, stages, _, _ = problem
    every = list(combinations(allowed, stages - 1))
    fits = [c for c in every if max(loads(weights, c, [1.0] * stages)) <= cap]
    caps = [float(cap)] * stages
    if not fits:
        with pytest.raises(PartitionError, match="fits the memory caps"):
            choose_cuts([1.0] * len(weights), crossing, allowed, stages, memory=weights, caps=caps)
        return
    cuts = choose_cuts([1.0] * len(weights), crossing, allowed, stages, memory=weights, caps=caps)
    assert max(loads(weights, cuts, [1.0] * stages)) <= cap


def test_long_lines_are_quick_and_close():
    n = 20_000
    weights = [1.0 + (i % 7) for i in range(n)]
    cuts = choose_cuts(weights, [1.0] * (n + 1), range(1, n), 8, slack=0.01)
    heaviest = max(loads(weights, cuts, [1.0] * 8))
    assert heaviest <= sum(weights) / 8 * 1.03


def test_refusals():
    with pytest.raises(PartitionError, match="stages=0"):
        choose_cuts([1.0], [0.0, 0.0], [], 0)
    with pytest.raises(PartitionError, match="needs 1 cuts; the graph allows 0"):
        choose_cuts([1.0], [0.0, 0.0], [], 2)
    with pytest.raises(PartitionError, match="one entry per stage"):
        choose_cuts([1.0, 1.0], [0.0, 0.0, 0.0], [1], 2, speeds=[1.0])
