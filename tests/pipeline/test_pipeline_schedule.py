"""Schedules as tables: complete, in order, within their memory, and drawn."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.simulate import ascii_gantt, save_gantt, simulate
from intarsia.pipeline.schedules import SCHEDULES, Action, Schedule, Slot, schedule

F, B, I, W = Action.FORWARD, Action.BACKWARD, Action.INPUT, Action.WEIGHT  # noqa: E741
UNIT = Cost(1.0, 1.0, 1.0, saved=1)


def build(name: str, ranks: int, rounds: int, per_rank: int) -> Schedule:
    if name == "Interleaved1F1B":
        return schedule(name, ranks, rounds * ranks, per_rank)
    return schedule(name, ranks, rounds)


any_schedule = st.builds(
    build, st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 9), st.integers(1, 3)
)


@given(any_schedule)
@settings(deadline=None, max_examples=120)
def test_every_pass_runs_exactly_once(plan):
    ran = Counter(step for steps in plan.ranks for step in steps)
    assert set(ran.values()) == {1}
    for stage in range(plan.stages):
        for m in range(plan.microbatches):
            assert Slot(stage, F, m) in ran
            assert (Slot(stage, B, m) in ran) != (Slot(stage, I, m) in ran and Slot(stage, W, m) in ran)


@given(any_schedule)
@settings(deadline=None, max_examples=120)
def test_nothing_runs_before_what_it_needs(plan):
    played = simulate(plan, [UNIT] * plan.stages)
    end = {s.slot: s.end for s in played.timeline}
    for span in played.timeline:
        stage, m = span.slot.stage, span.slot.microbatch
        if span.slot.action is F and stage:
            assert end[Slot(stage - 1, F, m)] <= span.start
        if span.slot.action in (B, I):
            assert end[Slot(stage, F, m)] <= span.start
            if stage + 1 < plan.stages:
                assert min(end[s] for a in (B, I) if (s := Slot(stage + 1, a, m)) in end) <= span.start
        if span.slot.action is W:
            assert end[Slot(stage, I, m)] <= span.start
    for steps in plan.ranks:
        order = [end[s] for s in steps]
        assert order == sorted(order)


@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None, max_examples=80)
def test_1f1b_holds_no_more_than_the_stages_behind(ranks, microbatches):
    played = simulate(schedule("1F1B", ranks, microbatches), [UNIT] * ranks)
    assert played.peak_memory == tuple(min(ranks - r, microbatches) for r in range(ranks))
    eager = simulate(schedule("GPipe", ranks, microbatches), [UNIT] * ranks)
    assert eager.peak_memory == (microbatches,) * ranks
    assert eager.step_time == pytest.approx(played.step_time)


@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None, max_examples=80)
def test_equal_stages_have_the_known_bubble(ranks, microbatches):
    for name in ("GPipe", "1F1B"):
        played = simulate(schedule(name, ranks, microbatches), [UNIT] * ranks)
        assert played.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_zero_bubble_and_interleaving_shorten_the_step(ranks):
    m = 4 * ranks
    plain = simulate(schedule("1F1B", ranks, m), [UNIT] * ranks)
    zero = simulate(schedule("ZeroBubble", ranks, m), [UNIT] * ranks)
    half = Cost(0.5, 0.5, 0.5)
    woven = simulate(schedule("Interleaved1F1B", ranks, m, 2), [half] * (2 * ranks))
    # With equal passes ZB-H1 leaves a third of the bubble, interleaving half of it.
    assert zero.step_time - 3 * m == pytest.approx((plain.step_time - 3 * m) / 3)
    assert woven.step_time - 3 * m == pytest.approx((plain.step_time - 3 * m) / 2)
    assert max(zero.peak_memory) <= max(plain.peak_memory)


def test_links_and_checkpointing_are_counted():
    plan = schedule("GPipe", 2, 2)
    cost = Cost(1.0, 1.0, 1.0, saved=10, weights=3)
    assert simulate(plan, [cost] * 2).step_time == 9
    assert simulate(plan, [cost] * 2, links=[0.5]).step_time == 10
    again = simulate(plan, [cost] * 2, borders=[4], checkpoint=True)
    assert again.step_time == 12
    assert again.peak_memory == (12 + 10, 12 + 4 + 4 + 10)
    assert simulate(plan, [cost] * 2).peak_memory == (12 + 20, 12 + 20)


def test_refusals():
    with pytest.raises(PartitionError, match="schedule='2F2B' is none of"):
        schedule("2F2B", 2, 2)
    with pytest.raises(PartitionError, match="microbatches=3 must divide by ranks=2"):
        schedule("Interleaved1F1B", 2, 3)
    with pytest.raises(PartitionError, match="per_rank=2"):
        schedule("1F1B", 2, 2, per_rank=2)
    with pytest.raises(PartitionError, match="1 costs for 2 stages"):
        simulate(schedule("1F1B", 2, 2), [UNIT])
    crossed = Schedule("crossed", 2, 1, ((Slot(0, B, 0), Slot(0, F, 0)), (Slot(1, F, 0), Slot(1, B, 0))))
    with pytest.raises(PartitionError, match="cannot run 0B0, 1F0"):
        simulate(crossed, [UNIT] * 2)


GOLDEN = {
    "GPipe": """\
rank 0 |F0|F1|F2|F3|  |  |  |  |  |  |B0   |B1   |B2   |B3   |
rank 1 |  |F0|F1|F2|F3|  |  |  |B0   |B1   |B2   |B3   |  |  |
rank 2 |  |  |F0|F1|F2|F3|B0   |B1   |B2   |B3   |  |  |  |  |
bubble 33%""",
    "1F1B": """\
rank 0 |F0|F1|F2|  |  |  |  |B0   |F3|B1   |  |B2   |  |B3   |
rank 1 |  |F0|F1|  |  |B0   |F2|B1   |F3|B2   |  |B3   |  |  |
rank 2 |  |  |F0|B0   |F1|B1   |F2|B2   |F3|B3   |  |  |  |  |
bubble 33%""",
    "ZeroBubble": """\
rank 0 |F0|F1|F2|  |  |I0|W0|F3|I1|W1|I2|W2|I3|W3|
rank 1 |  |F0|F1|  |I0|F2|I1|W0|F3|I2|W1|I3|W2|W3|
rank 2 |  |  |F0|I0|F1|I1|F2|I2|W0|F3|I3|W1|W2|W3|
bubble 14%""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_gantt_in_text(name):
    assert ascii_gantt(schedule(name, 3, 4)) == GOLDEN[name]


def test_gantt_of_interleaved_stages_names_the_stage():
    assert ascii_gantt(schedule("Interleaved1F1B", 2, 2)) == (
        "rank 0 |0F0|0F1|2F0|2F1|   |   |2B0    |   |2B1    |0B0    |0B1    |\n"
        "rank 1 |   |1F0|1F1|3F0|3B0    |3F1|3B1    |1B0    |1B1    |   |   |\n"
        "bubble 20%"
    )


def test_pictures_are_well_formed(tmp_path):
    for name in SCHEDULES:
        played = simulate(schedule(name, 3, 6), [UNIT] * (6 if name == "Interleaved1F1B" else 3))
        save_gantt(played, tmp_path / "a.svg")
        texts = [
            text for e in ElementTree.parse(tmp_path / "a.svg").iter() if (text := (e.text or "").strip())
        ]
        assert {"rank 0", "rank 1", "rank 2"} <= set(texts) and any(text.startswith(name) for text in texts)
    save_gantt(schedule("GPipe", 2, 2), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
