"""Plans: the fastest predicted way that fits."""

from __future__ import annotations

import copy

import pytest
import torch
from pipeline_zoo import calm, make
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.planner import measure, plan_pipeline


def big():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())]), torch.randn(32, 64)


def test_the_fastest_that_fits_is_chosen():
    model, x = big()
    plan = plan_pipeline(model, (x,), devices=2)
    times = [c.step_time for c in plan.candidates]
    assert times == sorted(times) and plan.choice is plan.candidates[0]
    assert {c.schedule for c in plan.candidates} == {"GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble"}
    assert {c.microbatches for c in plan.candidates} == {1, 2, 4, 8}
    assert not plan.choice.checkpoint
    assert len(plan.stages) == 2 * plan.choice.per_rank
    assert torch.equal(plan.stages(x), model(x))


def test_little_memory_brings_lean_schedules_and_recomputing():
    model, x = big()
    free = plan_pipeline(model, (x,), devices=2, schedules=["GPipe", "1F1B"], microbatches=[8])
    least = min(c.memory for c in free.candidates)
    tight = plan_pipeline(
        model, (x,), devices=2, schedules=["GPipe", "1F1B"], microbatches=[8], memory=least + 1
    )
    assert tight.choice.memory == least
    assert tight.refused > 0
    with pytest.raises(PartitionError, match="memory=10 is too little: the smallest plan takes"):
        plan_pipeline(model, (x,), devices=2, memory=10, microbatches=[2])


def test_refusals():
    model, x = big()
    with pytest.raises(PartitionError, match="microbatches=5 does not divide a batch of 32"):
        plan_pipeline(model, (x,), devices=2, microbatches=[5])
    with pytest.raises(PartitionError, match="no schedule of"):
        plan_pipeline(model, (x,), devices=2, microbatches=[1], schedules=["Interleaved1F1B"])
    with pytest.raises(PartitionError, match="on 500 devices; the model can be cut into at most"):
        plan_pipeline(model, (x,), devices=500, microbatches=[2])
    with pytest.raises(PartitionError, match="devices=0 must be 1 or more"):
        plan_pipeline(model, (x,), devices=0)


def test_prediction_stands_beside_measurement():
    model, args, kwargs = make("gpt2")
    calm(model)
    plan = plan_pipeline(model, args, kwargs, devices=2, schedules=["GPipe"], microbatches=[2])
    assert plan.measured is None
    done = measure(plan, args, kwargs, repeats=1)
    assert done.measured is not None and done.measured > 0
    text = str(done)
    assert text.startswith("chosen   GPipe") and "times the prediction" in text
    other = plan_pipeline(model, args, kwargs, devices=2, schedules=["1F1B"], microbatches=[2])
    with pytest.raises(PartitionError, match="cannot be measured in one process"):
        measure(other, args, kwargs)


def test_planning_leaves_the_model_as_it_was():
    model, args, kwargs = make("resnet")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    plan_pipeline(model, args, kwargs, devices=2, microbatches=[2], schedules=["1F1B"])
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for p in model.parameters())
