"""Costs: what autograd keeps is read off the graph exactly, and measuring leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from pipeline_zoo import make
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import schedule
from intarsia.pipeline.stages import stopwatch
from intarsia.pipeline.stages.profile import cost_source, memory_costs, profile, saved_bytes, weight_bytes
from intarsia.pipeline.stages.stage import build_stages
from intarsia.pipeline.stages.stopwatch import measure_passes
from intarsia.pipeline.stages.trace import trace


def really_kept(model, args, kwargs):
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    held = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        output = model(*args, **kwargs)
    assert output is not None
    return sum(t.numel() * t.element_size() for t in held.values())


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
def test_kept_bytes_are_exact(name):
    model, args, kwargs = make(name)
    captured = trace(model, args, kwargs)
    assert sum(saved_bytes(captured)) == really_kept(model, args, kwargs)


def test_weights_are_counted_once():
    model, args, kwargs = make("gpt2")
    captured = trace(model, args, kwargs)
    assert sum(weight_bytes(captured)) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_profiling_leaves_the_model_alone():
    model, args, kwargs = make("resnet")
    captured = trace(model, args, kwargs)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    seen = []
    costs = profile(captured, list(args), repeats=1, progress=lambda i, n: seen.append((i, n)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(costs) == len(captured.line.nodes) and seen[-1] == (
        2 * len(captured.line.nodes),
        2 * len(captured.line.nodes),
    )
    whole = total(costs)
    assert whole.forward > 0 and whole.backward_input > 0 and whole.seconds >= whole.forward
    conv = [c for c, n in zip(costs, captured.line.nodes, strict=True) if "conv2d" in n.name]
    assert all(c.forward > 0 and c.backward > 0 for c in conv)


def test_the_first_layer_has_no_gradient_of_its_input():
    model, args, _ = make("mlp")
    captured = trace(model, args)
    costs = profile(captured, list(args), repeats=2)
    assert costs[0].backward_input == 0.0 and costs[0].backward_weight > 0
    assert costs[2].backward_input > 0


def test_costs_add():
    assert Cost(1, 2, 3, 4, 5) + Cost(1, 1, 1, 1, 1) == Cost(2, 3, 4, 5, 6)


def test_nodes_add_up_to_the_passes_of_a_step(monkeypatch):
    model, args, _ = make("resnet")
    captured = trace(model, args)
    measured = []

    def noted(stage, values, repeats):
        found = measure_passes(stage, values, repeats)
        measured.append(found[0])
        return found

    monkeypatch.setattr(stopwatch, "measure_passes", noted)
    whole = total(profile(captured, list(args), repeats=1))
    assert len(measured) == 1
    assert whole.forward == pytest.approx(measured[0].forward)
    assert whole.backward == pytest.approx(measured[0].backward)


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt2"])
def test_a_step_in_stretches_gives_what_the_model_gives(name):
    model, args, kwargs = make(name)
    captured = trace(model.eval(), args, kwargs)
    costs = memory_costs(captured)
    whole = sum(2 * c.saved + c.weights for c in costs)
    places = stopwatch.stretches(captured, costs, whole // 2)
    assert places and set(places) <= set(captured.line.allowed)
    assert stopwatch.stretches(captured, costs, whole) == []
    values = captured.signature.flatten(args, kwargs)
    for stage in build_stages(captured, places):
        passes, values = measure_passes(stage, values, 1)
        assert passes.forward > 0 and passes.backward > 0
    expected = pytree.tree_leaves(model(*args, **kwargs))
    found = pytree.tree_leaves(captured.signature.unflatten(values))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_is_measured_without_the_models_hooks_and_gradients():
    model, args, _ = make("mlp")
    fired = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(fired.append)
        parameter.register_post_accumulate_grad_hook(fired.append)
    (stage,) = build_stages(trace(model, args), [])
    measure_passes(stage, args, 1)
    assert not fired
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_a_backward_pass_in_two_parts_has_a_price():
    """Torch's two parts have no public names; without them the price would be nothing."""
    assert stopwatch._two_parts() is not None
    model, args, kwargs = make("gpt2")
    captured = trace(model, args, kwargs)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tensors = captured.signature.flatten(args, kwargs)
    whole = total(profile(captured, tensors, repeats=1, apart=True))
    # A graph of small nodes: searching it in Python takes longer than its kernels save.
    assert whole.apart > 0
    assert total(profile(captured, tensors, repeats=1)).apart == 0
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_two_parts_have_a_price_on_the_meta_device():
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.empty(8, 64)
    captured = trace(model, (x,))
    measured = profile(captured, (x,), repeats=1, source=cost_source(captured), apart=True)
    assert (
        all(cost.apart > 0 for cost in measured[1:]) and measured[0].apart == 0
    )  # the input has no gradient


def test_zero_bubble_is_not_free():
    free, priced = ([Cost(1.0, 1.0, 1.0, apart=apart)] * 3 for apart in (0.0, 1.0))
    plan, plain = schedule("ZeroBubble", 3, 6), schedule("1F1B", 3, 6)
    assert simulate(plan, free).step_time < simulate(plain, free).step_time
    assert simulate(plan, priced).step_time > simulate(plain, priced).step_time
    assert simulate(plain, priced).step_time == simulate(plain, free).step_time
