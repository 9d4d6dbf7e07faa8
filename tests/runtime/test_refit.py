"""New weights in a compiled module: folded again, built again, neither captured nor partitioned."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime
from intarsia.errors import EngineError, RefitError


class Folds(nn.Module):
    """Weights that are folded into constants: a table of products, a batch norm, a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.norm.running_mean = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.conv(x)).relu().mean((2, 3))
        return made @ (self.a @ self.b).t() * torch.exp(self.a.sum())


def changed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5).add_(0.01)
    return other


@pytest.mark.parametrize("engines", ["openvino", "onnxruntime", "pytorch"])
def test_what_was_folded_is_folded_again(engines: str) -> None:
    torch.manual_seed(0)
    model, x = Folds().eval(), torch.randn(2, 3, 8, 8)
    fast = intarsia.compile(model, (x,), engines=engines, min_block_size=1)
    plan, other = str(fast.plan), changed(model)
    with mock.patch("torch.export.export", side_effect=AssertionError("captured anew")):
        fast.refit(other)
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)
    assert (fast(x) - model(x)).abs().max() > 1e-2
    assert str(fast.plan) == plan
    fast.refit(model.state_dict())
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert fast.state_dict().keys() == model.state_dict().keys()


def test_weights_of_a_state_dict_are_copied_and_those_of_a_model_watched() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,))
    state = {name: tensor.clone() for name, tensor in changed(model).state_dict().items()}
    fast.refit(state)
    expected = fast(x)
    state["weight"].zero_()
    assert torch.equal(fast(x), expected)
    other = changed(model)
    fast.refit(other)
    with torch.no_grad():
        other.weight.zero_()
    with pytest.raises(intarsia.errors.StaleWeightsError, match="refit"):
        fast(x)
    fast.refit(other)
    torch.testing.assert_close(fast(x), other(x))


def test_buffers_begin_where_the_new_ones_are() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    fast = intarsia.compile(Counts().eval(), (torch.ones(2),))
    fast.refit({"count": torch.tensor([10.0])})
    assert fast(torch.ones(2))[0] == 11
    assert fast(torch.ones(2))[0] == 12


class Largest(nn.Module):
    """Returns one result of an operator that has several and is decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).aminmax(dim=1).max


def test_one_result_of_several_is_the_answer() -> None:
    model, x = Largest().eval(), torch.rand(4, 3)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    with torch.no_grad():
        model.weight.add_(1)
    fast.refit(model)
    torch.testing.assert_close(fast(x), model(x).detach())


def test_sizes_that_vary_and_control_flow() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: self.linear(y).relu(), lambda y: y.sin(), (x,))

    model, x = Branches().eval(), torch.ones(3, 16)
    batch = torch.export.Dim("batch", min=2, max=9)
    for dynamic_shapes in (None, {"x": {0: batch}}):
        fast = intarsia.compile(model, (x,), dynamic_shapes=dynamic_shapes, min_block_size=1)
        other = changed(model)
        fast.refit(other)
        for value in (x, -x):
            torch.testing.assert_close(fast(value), other(value))
    torch.testing.assert_close(fast(torch.ones(7, 16)), other(torch.ones(7, 16)))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s: s.pop("weight"), "lack weight"),
        (lambda s: s.update(more=torch.ones(1)), "have, unlike the model, more"),
        (lambda s: s.update(weight=torch.ones(4, 4)), "weight has the shape"),
        (lambda s: s.update(weight=s["weight"].double()), "weight has the dtype"),
        (lambda s: s.update(weight=3), "weight is a int"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(edit: Any, words: str) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    fast = intarsia.compile(model, (x,))
    before, state = fast(x), dict(model.state_dict())
    edit(state)
    with pytest.raises(RefitError, match=words):
        fast.refit(state)
    assert torch.equal(fast(x), before)


def test_weights_of_which_something_else_was_proven() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)

    model, q = Masked().eval(), torch.randn(1, 2, 4, 8)
    fast = intarsia.compile(model, (q,))
    with pytest.raises(RefitError, match="another graph"):
        fast.refit({"mask": torch.ones(4, 4, dtype=torch.bool).tril()})
    torch.testing.assert_close(fast(q), model(q))


def test_what_some_weights_could_not_have_the_next_may() -> None:
    """A layer that had to leave its engine for one set of weights is back with the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(2, 16)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = [segment.engine for segment in fast.plan.segments]
    original = OnnxRuntime.build

    def refusing(self: OnnxRuntime, net: Any) -> Any:
        if any(
            (abs(w) > 1e5).any()
            for layer in net.get_layers()
            for t in layer.get_inputs()
            if t is not None
            for w in [t.constant]
            if w is not None
        ):
            raise EngineError("too large")
        return original(self, net)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnnxRuntime, "build", refusing)
        fast.refit({**before, "2.bias": before["2.bias"] + 1e6})
        assert "pytorch" in [segment.engine for segment in fast.plan.segments]
        fast.refit(before)
    assert [segment.engine for segment in fast.plan.segments] == plan
    torch.testing.assert_close(fast(x), model(x).detach())
