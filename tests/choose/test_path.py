"""The cheapest ways through blocks and engines, against trying them all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.choose.mixes import path_cost, shortest_paths

ENGINES = ("a", "b", "c")
# Whole numbers: sums in another order are then the same sums.
costs = st.integers(0, 9).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[dict[str, float]], dict[str, float]]:
    count = draw(st.integers(1, 5))
    blocks = []
    for _ in range(count):
        able = draw(st.sets(st.sampled_from(ENGINES), min_size=1))
        blocks.append({engine: draw(costs) for engine in sorted(able)})
    return blocks, {engine: draw(costs) for engine in ENGINES}


@given(problems(), st.integers(1, 6))
def test_against_brute_force(problem: tuple[list[dict[str, float]], dict[str, float]], count: int) -> None:
    blocks, entering = problem
    every = sorted(
        (path_cost(blocks, entering, way), sum(a != b for a, b in itertools.pairwise(way)), way)
        for way in itertools.product(*blocks)
    )
    assert shortest_paths(blocks, entering, count) == [way for _, _, way in every[:count]]


@pytest.mark.parametrize(
    ("blocks", "entering", "expected"),
    [
        ([], {}, ()),
        ([{"a": 2.0, "b": 1.0}], {"a": 0.0, "b": 0.0}, ("b",)),
        # A crossing there and back costs more than the block gains.
        (
            [{"a": 1.0, "b": 9.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 9.0}],
            {"a": 1.0, "b": 1.0},
            ("a",) * 3,
        ),
        # ... and here it does not.
        (
            [{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 1.0}, {"a": 1.0, "b": 9.0}],
            {"a": 1.0, "b": 1.0},
            ("a", "b", "a"),
        ),
        # Only one engine can run the middle.
        ([{"a": 1.0, "b": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 1.0}], {"a": 1.0, "b": 1.0}, ("b",) * 3),
    ],
)
def test_table(blocks: list[dict[str, float]], entering: dict[str, float], expected: tuple[str, ...]) -> None:
    assert shortest_paths(blocks, entering)[0] == expected
