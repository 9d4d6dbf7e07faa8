"""Block partitions: exact, never empty, and the richer problem against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.pipeline import solver as blockpartition
from intarsia.pipeline.solver import balance_stages

CHECK = settings(deadline=None, max_examples=150)


def all_cuts(n: int, k: int):
    for inner in combinations(range(1, n), k - 1):
        yield [0, *inner, n]


def blocks(sequence, cuts):
    return [sequence[a:b] for a, b in pairwise(cuts)]


def exact(block):
    return sum(map(Fraction, block))


def test_known():
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert blockpartition.solve([0, 0], partitions=2) == [[0], [0]]
    assert blockpartition.solve([0, 0, 0, 0, 1, 1], 5) in (
        [[0, 0], [0], [0], [1], [1]],
        [[0], [0, 0], [0], [1], [1]],
        [[0], [0], [0, 0], [1], [1]],
        [[0], [0], [0], [0, 1], [1]],
    )
    assert blockpartition.solve([1, 1, 1, 1, 1, 1], 3) == [[1, 1]] * 3
    assert blockpartition.solve([9, 1, 1, 1, 1], 3) == [[9], [1, 1], [1, 1]], "as even as the largest allows"
    assert blockpartition.solve((1, 2)) == [[1, 2]]
    assert blockpartition.solve(np.array([1, 2, 3, 4]), 2) == [[1, 2, 3], [4]]
    assert blockpartition.solve(list(np.array([1.0, 2.0, 3.0])), 2) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("sequence", "partitions"),
    [([1], 0), ([1], -1), ([], 1), ([42], 2), ([1, -1], 1), ([float("nan")], 1), ([float("inf"), 1.0], 2)],
)
def test_refusals(sequence, partitions):
    with pytest.raises(ValueError):
        blockpartition.solve(sequence, partitions)


numbers = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=9),
    st.lists(st.floats(0, 1e300), min_size=1, max_size=9),
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-9, 1e9, 0]), min_size=1, max_size=9),
)


@given(sequence=numbers, data=st.data())
@CHECK
def test_exact_and_never_empty(sequence, data):
    k = data.draw(st.integers(1, len(sequence)))
    found = blockpartition.solve(sequence, k)
    assert [x for block in found for x in block] == sequence
    assert len(found) == k and all(found)
    least = min(max(map(exact, blocks(sequence, cuts))) for cuts in all_cuts(len(sequence), k))
    assert max(map(exact, found)) == least


@given(sequence=st.lists(st.integers(0, 1000), min_size=1, max_size=200), data=st.data())
@CHECK
def test_long_sequences_agree_with_the_richer_solver(sequence, data):
    k = data.draw(st.integers(1, min(len(sequence), 12)))
    found = blockpartition.solve(sequence, k)
    assert all(found) and max(map(sum, found)) == balance_stages(sequence, k).bottleneck


@st.composite
def problems(draw):
    n = draw(st.integers(1, 7))
    k = draw(st.integers(1, n))
    small = st.integers(0, 10)
    memory = draw(st.none() | st.lists(small, min_size=n, max_size=n))
    caps = st.integers(5, 30) | st.lists(st.integers(5, 30), min_size=k, max_size=k)
    return {
        "costs": draw(st.lists(small, min_size=n, max_size=n)),
        "stages": k,
        "memory": memory,
        "memory_cap": None if memory is None else draw(st.none() | caps),
        # powers of two divide exactly, so equal is equal
        "speeds": draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=k, max_size=k)),
    }


def brute_force(p):
    """Every balance that is allowed, as (bottleneck, sum of squares, balance)."""
    n, k = len(p["costs"]), p["stages"]
    cap = p["memory_cap"]
    caps = cap if isinstance(cap, list) else [float("inf") if cap is None else cap] * k
    for cuts in all_cuts(n, k):
        times = []
        for j, (a, b) in enumerate(pairwise(cuts)):
            if p["memory"] is not None and sum(p["memory"][a:b]) > caps[j]:
                break
            times.append(sum(p["costs"][a:b]) / (p["speeds"] or [1] * k)[j])
        else:
            yield (
                max(times),
                sum(t * t for t in times),
                [b - a for a, b in pairwise(cuts)],
            )


@pytest.mark.slow
@given(problem=problems())
@settings(deadline=None, max_examples=300)
def test_the_richer_problem_against_brute_force(problem):
    allowed = sorted(brute_force(problem))
    arguments = {key: value for key, value in problem.items() if value is not None}
    if not allowed:
        with pytest.raises(ValueError, match="no balance"):
            balance_stages(**arguments)
        return
    found = balance_stages(**arguments)
    assert found.bottleneck == allowed[0][0]
    assert sum(t * t for t in found.times) == allowed[0][1], "the most even of the best"
    assert found.balance in [balance for _, _, balance in allowed]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"costs": [1], "stages": 0}, "positive"),
        ({"costs": [1], "stages": 2}, "1 layers cannot fill 2"),
        ({"costs": [-1.0], "stages": 1}, "-1"),
        ({"costs": [1, 1], "stages": 1, "memory_cap": 3}, "needs the memory"),
        ({"costs": [1, 1], "stages": 2, "speeds": [1]}, "per stage"),
        ({"costs": [1, 1], "stages": 2, "speeds": [1, 0]}, "positive"),
        ({"costs": [1, 1], "stages": 2, "memory": [1]}, "2 entries, got 1"),
        ({"costs": [1, 1], "stages": 1, "memory": [2, 2], "memory_cap": 3}, "no balance"),
    ],
)
def test_refusals_of_the_richer_solver(arguments, match):
    with pytest.raises(ValueError, match=match):
        balance_stages(**arguments)


@given(n=st.integers(1, 40), data=st.data())
@CHECK
def test_equal_costs_give_equal_blocks(n, data):
    k = data.draw(st.integers(1, n))
    lengths = [len(block) for block in blockpartition.solve([1.0] * n, k)]
    assert max(lengths) - min(lengths) <= 1
