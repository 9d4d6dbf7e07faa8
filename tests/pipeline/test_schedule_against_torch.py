"""Our schedules, which the simulator plays, are the orders torch's own schedules run in."""

from __future__ import annotations

import re
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import SCHEDULES, Action, Schedule, Slot, schedule

CHECK = settings(deadline=None, max_examples=40)
PASS = re.compile(r"(\d+)([FBIW])(\d+)")
NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble"]


def slots(row) -> tuple[Slot, ...]:
    """What a rank computes, in torch's order; its other actions (reducing gradients, say) are no passes."""
    found = [PASS.fullmatch(str(action)) for action in row if action is not None]
    return tuple(Slot(int(m[1]), Action("FBIW".index(m[2])), int(m[3])) for m in found if m)


def torchs(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> list[tuple[Slot, ...]]:
    return [slots(row) for row in get_schedule_ops(name, ranks, microbatches, per_rank)]


@given(st.integers(1, 6), st.integers(1, 12))
@CHECK
def test_gpipe(ranks, microbatches):
    assert list(schedule("GPipe", ranks, microbatches).ranks) == torchs("GPipe", ranks, microbatches)


@given(st.integers(2, 6), st.integers(0, 8))
@CHECK
def test_1f1b(ranks, more):
    ours, theirs = schedule("1F1B", ranks, ranks + more), torchs("1F1B", ranks, ranks + more)
    assert list(ours.ranks[:-1]) == theirs[:-1]
    # The table that torch draws counts the last rank's forward passes from 1, though it runs them from 0.
    first = theirs[-1][0].microbatch
    last = [Slot(s.stage, s.action, s.microbatch - first * (s.action is Action.FORWARD)) for s in theirs[-1]]
    assert list(ours.ranks[-1]) == last


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4))
@CHECK
def test_interleaved(ranks, rounds, per_rank):
    ours = schedule("Interleaved1F1B", ranks, rounds * ranks, per_rank)
    assert list(ours.ranks) == torchs("Interleaved1F1B", ranks, rounds * ranks, per_rank)


@given(st.integers(1, 6), st.integers(1, 3))
@CHECK
def test_zero_bubble_computes_the_same_in_no_more_time(ranks, rounds):
    """torch's order with one stage a rank; it leaves the weight gradients waiting as long as ours does."""
    microbatches = rounds * ranks
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks, None
    table = schedules.ScheduleInterleavedZeroBubble([stage], microbatches).pipeline_order
    theirs = Schedule("torch's", ranks, microbatches, tuple(slots(table[r]) for r in range(ranks)))
    ours = schedule("ZeroBubble", ranks, microbatches)
    assert [sorted(map(str, r)) for r in ours.ranks] == [sorted(map(str, r)) for r in theirs.ranks]
    costs = [Cost(1.0, 1.0, 1.0, saved=1)] * ranks
    mine, torch_time = simulate(ours, costs), simulate(theirs, costs)
    assert mine.step_time == torch_time.step_time
    assert mine.peak_memory == torch_time.peak_memory


@given(
    st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble"]), st.integers(2, 5), st.integers(1, 14)
)
@settings(deadline=None, max_examples=120)
def test_what_torch_refuses_is_known(name, ranks, microbatches):
    kind = {"ZeroBubble": "InterleavedZeroBubble"}.get(name, name)
    try:
        get_schedule_ops(kind, ranks, microbatches)
    except ValueError:
        assert SCHEDULES[name].refusal(ranks, microbatches) is not None
    else:
        assert SCHEDULES[name].refusal(ranks, microbatches) is None
