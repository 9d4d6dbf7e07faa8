"""Clusters: their description, the fast simulation, and a search that never leaves the best out."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.cluster import Cluster
from intarsia.pipeline.plan.search import search, simulate_layout
from intarsia.pipeline.plan.simulate import StageTable, end_times, peak_memory, simulate
from intarsia.pipeline.plan.space import (
    Allowed,
    LayerLine,
    Layout,
    Space,
    least_memory_of,
    least_seconds_of,
    merge,
)
from intarsia.pipeline.planner import plan_pipeline
from intarsia.pipeline.schedules import SCHEDULES, Action, Slot, schedule, slot_table

FAST = {"bandwidth": 1e9, "latency": 1e-5}
SLOW = {"bandwidth": 1e7, "latency": 1e-3}
NUMBERS = st.floats(0, 4, allow_subnormal=False).map(lambda x: round(x, 3))


def test_a_cluster_is_read_from_a_file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {"devices": 16, "memory": 80e9, "per_host": 8, "within": FAST, "between": SLOW, "handover": 1e-4}
        )
    )
    cluster = Cluster.read(path)
    assert (cluster.devices, cluster.memory, cluster.handover) == (16, 80_000_000_000, 1e-4)
    assert cluster.link(0, 7) is cluster.within and cluster.link(7, 8) is cluster.between
    assert [link is cluster.between for link in cluster.chain(4, 1)] == [False] * 4
    # Three ranks a replica: the second replica's first link, or the third's, may cross hosts.
    assert [link is cluster.between for link in cluster.chain(3, 5)] == [False, True, True]
    assert cluster.averaging(2, 4) is cluster.within and cluster.averaging(2, 5) is cluster.between


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "the cluster must be a JSON object, not list"),
        ({"memory": 1, "link": FAST}, "the cluster has no 'devices'"),
        ({"devices": 2, "link": FAST}, "the cluster has no 'memory'"),
        ({"devices": 2.5, "memory": 1, "link": FAST}, "devices=2.5 must be a whole number"),
        ({"devices": 0, "memory": 1, "link": FAST}, "devices=0 must be a number of more than 0"),
        ({"devices": True, "memory": 1, "link": FAST}, "devices=True must be a number"),
        ({"devices": 2, "memory": 1}, "the cluster has no 'within'"),
        (
            {"devices": 2, "memory": 1, "per_host": 1},
            "the cluster has no 'between': the link between hosts",
        ),
        ({"devices": 2, "memory": 1, "link": FAST, "within": FAST}, "has 'link', for all, and 'within'"),
        ({"devices": 2, "memory": 1, "link": {"latency": 1}}, "within has no 'bandwidth'"),
        (
            {"devices": 2, "memory": 1, "link": {"bandwith": 1}},
            "unknown entry 'bandwith'; .*mean 'bandwidth'",
        ),
        (
            {"devices": 2, "memory": 1, "link": FAST, "spead": 2},
            "unknown entry 'spead'; .*mean 'speed'",
        ),
        (
            {"devices": 2, "memory": 1, "link": FAST, "handover": -1},
            "handover=-1 must be a number of at least 0",
        ),
        ({"devices": 2, "memory": 1, "link": {"bandwidth": float("nan")}}, "within.bandwidth=nan must be"),
    ],
)
def test_a_wrong_description_is_refused(data, sentence):
    with pytest.raises(PartitionError, match=sentence):
        Cluster.of(data)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(PartitionError, match="cannot be read"):
        Cluster.read(tmp_path / "none.json")
    (tmp_path / "junk.json").write_text("{")
    with pytest.raises(PartitionError, match="is not JSON"):
        Cluster.read(tmp_path / "junk.json")


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 5))
    m = draw(st.integers(1, 10))
    per_rank = draw(st.integers(1, 3)) if name == "Interleaved1F1B" else 1
    return name, ranks, m * ranks if name == "Interleaved1F1B" else m, per_rank


@given(schedules())
def test_arrays_of_slots_are_the_schedule(problem):
    slots, arrays = schedule(*problem), slot_table(*problem)
    assert [list(rank) for rank in slots.ranks] == [
        [
            Slot(int(s), Action(a), int(m))
            for s, a, m in zip(arrays.stages[b:e], arrays.actions[b:e], arrays.microbatches[b:e], strict=True)
        ]
        for b, e in itertools.pairwise(arrays.begins)
    ]


def played(plan, costs, links, checkpoint):
    """The end of every slot, one slot after the other: what the arrays must give."""
    ends, clock = {}, [0.0] * len(plan.ranks)
    waiting = [list(rank) for rank in plan.ranks]

    def length(slot):
        c = costs[slot.stage]
        whole = c.backward + c.forward * checkpoint
        parts = (whole, 0.0) if checkpoint else (c.backward_input, c.backward_weight + c.apart)
        return (c.forward, whole, *parts)[slot.action]

    def ready(slot):
        stage, action, m = slot
        if action is Action.FORWARD:
            return ends.get((stage - 1, "F", m), None if stage else 0.0), links[stage - 1] if stage else 0.0
        if action is Action.WEIGHT:
            return 0.0, 0.0
        last = stage + 1 == plan.stages
        return (0.0 if last else ends.get((stage + 1, "G", m))), 0.0 if last else links[stage]

    while any(waiting):
        for rank, slots in enumerate(waiting):
            while slots and (when := ready(slots[0]))[0] is not None:
                slot = slots.pop(0)
                clock[rank] = max(clock[rank], sum(when)) + length(slot)
                if slot.action is not Action.WEIGHT:
                    ends[slot.stage, "F" if slot.action is Action.FORWARD else "G", slot.microbatch] = clock[
                        rank
                    ]
    return clock


@given(schedules(), st.data())
def test_the_simulation_by_arrays_is_that_of_one_slot_after_the_other(problem, data):
    count = problem[1] * problem[3]
    row = st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
    costs = [Cost(*r[:3], apart=r[3]) for r in data.draw(st.lists(row, min_size=count, max_size=count))]
    links = data.draw(st.lists(NUMBERS, min_size=count - 1, max_size=count - 1))
    recompute = data.draw(st.booleans())
    plan = schedule(*problem)
    found = simulate(plan, costs, links=links, checkpoint=recompute)
    assert found.step_time == pytest.approx(max(played(plan, costs, links, recompute)), rel=1e-12)
    table = StageTable.of(costs)
    for limit in (found.step_time * 0.7, found.step_time * 1.3 + 1):
        ends = end_times(plan.table, table, np.array(links, float), recompute, limit)
        assert ends.max() == pytest.approx(found.step_time) or (
            np.isinf(ends.max()) and limit <= found.step_time
        )


@st.composite
def spaces(draw):
    n = draw(st.integers(1, 6))
    seconds = st.floats(0.01, 2).map(lambda x: round(x, 2))

    def rows(strategy):
        return np.array([[draw(strategy) for _ in range(n)] for _ in range(4)])

    line = LayerLine(
        rows(st.sampled_from([0.0, 0.5])),
        rows(seconds),
        np.array([float(draw(st.integers(0, 9))) for _ in range(n)]),
        np.array([float(draw(st.integers(0, 9))) for _ in range(n)]),
        np.array([float(draw(st.integers(1, 9))) for _ in range(n)]),
    )
    devices = draw(st.integers(1, 8))
    cluster = Cluster.of(
        {
            "devices": devices,
            "memory": draw(st.sampled_from([40, 80, 120, 10_000])),
            "per_host": draw(st.integers(1, devices)),
            "within": {"bandwidth": draw(st.sampled_from([10.0, 1e6])), "latency": 0.01},
            "between": {
                "bandwidth": draw(st.sampled_from([3.0, 1e3])),
                "latency": draw(st.sampled_from([0.0, 0.5])),
            },
            "speed": draw(st.sampled_from([1.0, 2.0])),
            "handover": draw(st.sampled_from([0.0, 0.05])),
        }
    )
    return Space(line, cluster, draw(st.sampled_from([1, 4, 6, 12])), Allowed(least=draw(st.integers(1, 2))))


def every_layout(space):
    """All that torch would run, tried one by one."""
    for replicas, m, samples in space.divisions():
        for name, ranks, recompute in itertools.product(
            SCHEDULES, range(1, space.cluster.devices // replicas + 1), (False, True)
        ):
            per_rank = 2 if name == "Interleaved1F1B" else 1
            if ranks * per_rank > len(space.line) or SCHEDULES[name].refusal(ranks, m) is not None:
                continue
            if (name in ("Interleaved1F1B", "ZeroBubble") and ranks == 1) or (per_rank > 1 and m % ranks):
                continue
            yield Layout(name, ranks, per_rank, replicas, m, samples, recompute)


def test_nobody_asks_the_first_stage_for_a_gradient_of_inputs():
    line = LayerLine.of([(1, [Cost(1.0, 2.0, 3.0, apart=0.5)] * 4)], [0.0] * 4, [0.0] * 4)
    table = line.stages([2], 1)
    assert table.seconds.T.tolist() == [[2.0, 0.0, 10.0, 0.0], [2.0, 4.0, 6.0, 1.0]]
    assert table.work(False).tolist() == [12.0, 12.0]
    assert table.work(False, splits_backward=True).tolist() == [12.0, 13.0]


@settings(max_examples=30, deadline=None)
@given(spaces())
def test_the_search_never_leaves_the_best_out(space):
    tried = [found for layout in every_layout(space) if (found := simulate_layout(space, layout)) is not None]
    if not tried:
        with pytest.raises(PartitionError, match=r"is too little|cannot be divided"):
            search(space)
        return
    best = search(space)[0]
    assert best.step_time == pytest.approx(min(f.step_time for f in tried), rel=1e-9)
    assert best.memory <= space.cluster.memory


@settings(max_examples=30, deadline=None)
@given(spaces())
def test_bounds_are_below_what_is_simulated(space):
    for layout in every_layout(space):
        ranks = np.array([layout.ranks])
        for by_memory in (False, True):
            _, table = space.table(layout, by_memory)
            links, averaging = space.links(layout, table), space.averaging(layout, table)
            slots = slot_table(layout.schedule, layout.ranks, layout.microbatches, layout.per_rank)
            ends = end_times(slots, table, links, layout.checkpoint)
            time = float((np.maximum.reduceat(ends, slots.begins[:-1]) + averaging).max())
            memory = peak_memory(slots, table, layout.checkpoint, 4)
            memory = memory.reshape(layout.per_rank, layout.ranks).sum(axis=0)
            near = least_seconds_of(layout, table, links, averaging)
            assert float(space.least_seconds(layout, ranks)[0]) <= time * (1 + 1e-9)
            assert near <= time * (1 + 1e-9)
            assert float(space.least_memory(layout, ranks)[0]) <= memory.max()
            assert (least_memory_of(layout, table, 4) <= memory).all()


@pytest.mark.slow
def test_a_thousand_layers_on_a_thousand_devices_take_seconds():
    n, each = 1000, np.full((4, 1000), 1e-3)
    each[3] = 0
    line = LayerLine(0.1 * each, each, np.full(n, 2e7), np.full(n, 2e8), np.full(n, 4e6))
    cluster = Cluster.of(
        {
            "devices": 1024,
            "memory": 80e9,
            "per_host": 8,
            "within": {"bandwidth": 3e11, "latency": 5e-6},
            "between": {"bandwidth": 2.5e10, "latency": 1e-5},
            "handover": 3e-5,
        }
    )
    begin = time.process_time()
    best = search(Space(line, cluster, 4096))[0]
    assert time.process_time() - begin < 30
    ideal = 4096 * 3 * 1.0 / 1024  # every device busy all the time, nothing fixed
    assert best.devices == 1024 and best.memory <= 80e9 and ideal < best.step_time < 1.3 * ideal


def test_nodes_are_merged_into_layers():
    costs = [Cost(1.0, 2.0, 3.0, 4, 5)] * 5
    assert merge(costs, [2]) == [Cost(2.0, 4.0, 6.0, 8, 10), Cost(3.0, 6.0, 9.0, 12, 15)]


def test_noise_never_makes_a_larger_micro_batch_cheaper():
    line = LayerLine.of([(2, [Cost(4.0)]), (8, [Cost(3.0)])], [0.0], [0.0])
    assert line.seconds(2)[0, 0] <= line.seconds(8)[0, 0]


def test_a_plan_says_what_it_is_and_what_is_missing():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x = torch.randn(8, 8)
    cluster = {"devices": 4, "memory": 10**9, "link": {"bandwidth": 1e15}}
    plan = plan_pipeline(model, (x,), cluster=Cluster.of(cluster), batch=32)
    layout = plan.layout
    assert layout.replicas * layout.microbatches * layout.samples == 32 and layout.samples >= 2
    assert len(plan.stages) == layout.stages
    assert (f"x {layout.replicas} replicas" in str(plan).splitlines()[0]) == (layout.replicas > 1)
    assert torch.equal(plan.stages(x), model(x))
    with pytest.raises(PartitionError, match=f"the plan is for {layout.devices} processes.*; 0 take part"):
        plan.distributed()
    for options, sentence in (
        ({}, "needs devices=, their number, or cluster="),
        ({"devices": 2, "cluster": Cluster.of(cluster)}, "give one of them"),
        ({"devices": 2, "batch": 8}, "need cluster="),
        ({"devices": 2, "schedules": ["1F2B"]}, "schedule='1F2B' is none of GPipe"),
        ({"cluster": Cluster.of(cluster), "batch": 1}, "batch=1 is less than the 2 samples"),
        ({"cluster": Cluster.of(cluster), "microbatches": [7]}, "a batch of 8 cannot be divided"),
        ({"cluster": Cluster.of(cluster), "agree": True}, "agree=True needs"),
    ):
        with pytest.raises(PartitionError, match=sentence):
            plan_pipeline(model, (x,), **options)
