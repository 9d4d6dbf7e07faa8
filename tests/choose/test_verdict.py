"""The plan that is kept is a function of the measurements: never beaten, simple where it makes no odds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intarsia.choose.findings import Trial, is_decided, is_faster, winner


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # name, segments, options, seconds
        ([("a", 1, 0, (2, 2, 2)), ("b", 1, 0, (1, 1, 1))], "b"),
        ([("a", 1, 0, (1, 1, 1)), ("mix", 4, 0, (0.9, 0.9, 0.9))], "mix"),
        ([("a", 1, 0, (1, 1.2, 0.8)), ("mix", 4, 0, (0.9, 1.3, 0.7))], "a"),  # within the spread
        ([("a", 1, 0, (1, 1, 1)), ("a, spinning", 1, 1, (0.99, 1.01, 0.98))], "a"),
        ([("a", 1, 0, (1, 1, 1)), ("a, spinning", 1, 1, (0.8, 0.8, 0.8))], "a, spinning"),
        # Two as simple as each other: the faster one, be it by a hair, and be it behind the mix by a hair.
        ([("a", 1, 0, (1.05, 1, 1)), ("b", 1, 0, (1, 0.99, 1)), ("mix", 2, 0, (1.01, 0.98, 0.98))], "b"),
        ([("only", 3, 0, (5.0,))], "only"),
        # One round shows no spread: by 1.2 times it may be noise, by 1.4 hardly.
        ([("a", 1, 0, (1.2,)), ("a, no patterns", 1, 1, (1.0,))], "a"),
        ([("a", 1, 0, (1.4,)), ("a, no patterns", 1, 1, (1.0,))], "a, no patterns"),
    ],
)
def test_table(rows: list[tuple[str, int, int, tuple[float, ...]]], expected: str) -> None:
    entries = [Trial(name, segments, seconds, options) for name, segments, options, seconds in rows]
    assert winner(entries).name == expected


def test_the_usual_plan_stays_unless_another_wins_by_more_than_the_spread() -> None:
    """Three rounds of BERT-base on a busy machine: one of them tells the opposite of the other two."""
    usual = Trial("openvino", 1, (156.1, 201.2, 163.4))
    other = Trial("onnxruntime", 1, (177.9, 154.6, 156.9))
    assert winner([usual, other]).name == "onnxruntime"
    assert winner([other, usual], usual="openvino").name == "openvino"
    quick = Trial("onnxruntime", 1, (150.0, 154.6, 156.9))
    assert winner([usual, quick], usual="openvino").name == "onnxruntime"


times = st.floats(min_value=1e-6, max_value=10.0)


@st.composite
def entries(draw: st.DrawFn) -> list[Trial]:
    rounds = draw(st.integers(1, 6))
    count = draw(st.integers(1, 6))
    return [
        Trial(
            f"plan {i}",
            draw(st.integers(1, 4)),
            tuple(draw(st.lists(times, min_size=rounds, max_size=rounds))),
            draw(st.integers(0, 1)),
        )
        for i in range(count)
    ]


@given(entries())
def test_nothing_as_simple_was_faster_and_nothing_clearly_faster_was_there(plans: list[Trial]) -> None:
    kept = winner(plans)
    for plan in plans:
        assert not (plan.size <= kept.size and plan.median < kept.median)
        assert not is_faster(plan, kept)
    assert winner(plans) is kept


@given(entries(), st.randoms(use_true_random=False))
def test_the_order_of_the_plans_changes_no_figure(plans: list[Trial], random: object) -> None:
    shuffled = list(plans)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = winner(plans), winner(shuffled)
    assert (one.median, one.size) == (other.median, other.size)


def test_rounds_are_compared_in_pairs() -> None:
    """The machine slows down for both alike, which is not a spread between them."""
    drifting = (1.0, 2.0, 4.0, 8.0)
    one = Trial("one", 2, tuple(0.95 * s for s in drifting))
    assert is_faster(one, Trial("other", 1, drifting))


@given(entries(), st.integers(0, 6), st.data())
def test_a_race_that_is_decided_would_have_ended_alike(
    plans: list[Trial], left: int, data: st.DataObject
) -> None:
    """Whatever the rounds that are left would show, unless another plan is ahead by far in the end."""
    kept, run = winner(plans), data.draw(st.integers(0, left))
    if not is_decided(plans, len(kept.seconds) + left):
        return
    whole = [
        replace(plan, seconds=plan.seconds + tuple(data.draw(st.lists(times, min_size=run, max_size=run))))
        for plan in plans
    ]
    (same,) = [plan for plan in whole if plan.name == kept.name]
    assert winner(whole).name == kept.name or any(plan.median * 1.3 < same.median for plan in whole)


@pytest.mark.parametrize(
    ("simple", "other", "decided"),
    [
        ((1.0, 1.0, 1.0), (1.1, 1.1, 1.1), True),  # three of nine are lost: it cannot win seven any more
        ((1.0, 1.0, 1.0), (1.1, 1.1, 0.9), False),
        ((1.0, 1.0, 1.0, 1.0, 1.0), (1.1, 0.9, 1.1, 0.9, 1.1), True),
        ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), False),
    ],
)
def test_a_race_of_nine_rounds_ends_where_the_simplest_plan_stays(
    simple: tuple[float, ...], other: tuple[float, ...], decided: bool
) -> None:
    plans = [Trial("one", 1, simple), Trial("mix", 2, other)]
    assert is_decided(plans, rounds=9) is decided
    variant = [Trial("usual", 1, simple), Trial("option", 1, other, options=1)]
    assert is_decided(variant, rounds=9) is decided
    # Of two engines the usual one stays; without one the better median decides, which may still change.
    assert is_decided([Trial("a", 1, other), Trial("b", 1, simple)], rounds=9, usual="b") is decided
    assert not is_decided([Trial("a", 1, other), Trial("b", 1, simple)], rounds=9)
