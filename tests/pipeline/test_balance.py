"""Profiling: time and memory of layers, in a sandbox, and the balances that follow."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from intarsia.pipeline.balance import (
    balance_by_size,
    balance_by_time,
    balance_cost,
    cache_path,
    layerwise_sandbox,
    profile_sizes,
    profile_times,
)
from intarsia.pipeline.gpipe.skip import pop, skippable, stash

cpu = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))


class Delay(nn.Module):
    runs = 0

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        Delay.runs += 1
        time.sleep(self.seconds)
        return x


class Expand(nn.Module):
    """Adds leaves of its own, which stay alive until the backward pass."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


def test_balance_cost():
    assert balance_cost([1, 2, 3, 4, 5, 6], 2) == [4, 2]


@pytest.fixture
def slept(clock, monkeypatch):
    """Sleeping moves the clock, and takes no time."""
    monkeypatch.setattr(time, "sleep", clock)


@pytest.mark.usefixtures("slept")
def test_balance_by_time():
    model = nn.Sequential(*(Delay(i / 200) for i in (1, 2, 3, 4, 5, 6)))
    assert balance_by_time(2, model, torch.rand(1), device="cpu", timeout=0) == [4, 2]


@pytest.mark.usefixtures("slept")
def test_backward_and_recomputation_are_costed():
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.02)
            return grad

    class Slow(nn.Module):
        def forward(self, x):
            return SlowBackward.apply(x)

    layers = nn.Sequential(nn.Linear(1, 1), Slow(), Delay(0.02))
    with_it = profile_times(layers, torch.rand(1, 1), 0, cpu, recompute=True)
    without = profile_times(layers, torch.rand(1, 1), 0, cpu, recompute=False)
    # The gradient goes on through the input of the second layer.
    assert with_it == pytest.approx([0, 0.02, 0.04]) and without == pytest.approx([0, 0.02, 0.02])


def test_each_layer_gets_the_output_of_the_one_before():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(128, 10))
    sample = torch.rand(10, 3, 8, 8)
    assert sum(balance_by_time(2, model, sample, device="cpu", timeout=0)) == 4
    assert sum(balance_by_size(2, model, sample, device="cpu")) == 4


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_the_model_is_not_touched(balance):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    balance(1, model, torch.rand(2, 3, 4, 4), device="cpu")
    assert not model.training and all(p.grad is None for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_sandbox():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    for layer, original in zip(layerwise_sandbox(model, cpu), model, strict=True):
        assert layer.training and layer is not original
    assert not any(layer.training for layer in model)


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_gradients_already_there_are_refused(balance):
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model(torch.rand(1, 3, 4, 4)).norm().backward()
    with pytest.raises(ValueError, match="already has a gradient"):
        balance(1, model, torch.rand(1, 3, 4, 4), device="cpu")


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_trees_and_skips(balance):
    class Twin(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x.detach(), 3)}

    class Add(nn.Module):
        def forward(self, tree):
            return tree["a"] + tree["b"][0] * tree["b"][1]

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("skip", x * 2)
            return x

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x):
            return x + (yield pop("skip"))

    model = nn.Sequential(Stash(), Twin(), Add(), Pop())
    assert sum(balance(2, model, torch.rand(4, requires_grad=True), device="cpu")) == 4


def test_balance_by_size_of_activations():
    sample = torch.rand(10, 100, 100)
    assert balance_by_size(2, nn.Sequential(*map(Expand, (1, 2, 3, 4, 5, 6))), sample, device="cpu") == [4, 2]
    assert balance_by_size(2, nn.Sequential(*map(Expand, (6, 5, 4, 3, 2, 1))), sample, device="cpu") == [2, 4]


def test_balance_by_size_of_parameters():
    up = nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(6)))
    assert balance_by_size(2, up, torch.rand(7, 1), param_scale=100, device="cpu") == [4, 2]
    down = nn.Sequential(*(nn.Linear(i + 2, i + 1) for i in reversed(range(6))))
    assert balance_by_size(2, down, torch.rand(1, 7), param_scale=100, device="cpu") == [2, 4]


@pytest.mark.parametrize(("param_scale", "expected"), [(0, [2, 4]), (100, [5, 1])])
def test_param_scale(param_scale, expected):
    class Tradeoff(nn.Module):
        def __init__(self, param_size, latent_size):
            super().__init__()
            self.fc = nn.Linear(param_size, param_size)
            self.expand = Expand(latent_size)

        def forward(self, x):
            return self.expand(x)

    model = nn.Sequential(*(Tradeoff(i, 7 - i) for i in range(1, 7)))
    sample = torch.rand(1, requires_grad=True)
    assert balance_by_size(2, model, sample, param_scale=param_scale, device="cpu") == expected


def test_bytes_are_exact():
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(32, 8))
    x = torch.rand(64, 16)
    # A linear layer keeps its input, which is not its own, and makes its output; tanh keeps its output.
    sizes = profile_sizes(model, x, chunks=4, param_scale=1, device=cpu)
    assert sizes == [16 * 32 * 4 + 16 * 32 * 4, 16 * 32 * 4, 0, 16 * 8 * 4 + (32 * 8 + 8) * 4]
    direct = profile_sizes(model, x[:3], chunks=1, param_scale=0, device=cpu)
    assert direct[0] == 3 * 32 * 4
    with pytest.raises(ValueError, match="chunks"):
        profile_sizes(model, x, chunks=0, param_scale=1, device=cpu)


def test_times_are_remembered_by_content():
    def times(*seconds):
        Delay.runs = 0
        return profile_times(nn.Sequential(*map(Delay, seconds)), torch.rand(2), 0, cpu)

    first = times(0.001, 0.002)
    assert Delay.runs > 4
    assert times(0.001, 0.002) == first and Delay.runs == 2, "once each, for the output"
    assert times(0.002, 0.001) == first[::-1] and Delay.runs == 2, "by content, not by place"
    times(0.003)
    assert Delay.runs > 4, "another attribute, another layer"
    Delay.runs = 0
    profile_times(nn.Sequential(Delay(0.001)), torch.rand(3), 0, cpu)
    assert Delay.runs > 4, "another shape"
    Delay.runs = 0
    profile_times(nn.Sequential(Delay(0.001)), torch.rand(2), 0, cpu, cache=False)
    assert Delay.runs > 4, "switched off"


@pytest.mark.filterwarnings("ignore:cannot read")
@pytest.mark.parametrize("content", ["{ not json", "[1, 2]"])
def test_a_damaged_cache_is_replaced(content):
    cache_path().parent.mkdir(parents=True)
    cache_path().write_text(content)
    (seconds,) = profile_times(nn.Sequential(Delay(0.001)), torch.rand(2), 0, cpu)
    (key,) = json.loads(cache_path().read_text())
    assert json.loads(cache_path().read_text()) == {key: seconds}
    cache_path().write_text(json.dumps({key: "soon"}))
    (again,) = profile_times(nn.Sequential(Delay(0.001)), torch.rand(2), 0, cpu)
    assert json.loads(cache_path().read_text()) == {key: again}


def test_code_is_content():
    def layer(code):
        namespace = {"nn": nn, "__name__": __name__}
        exec(f"class Made(nn.Module):\n    def forward(self, x):\n        return {code}", namespace)
        globals()["Made"] = namespace["Made"]
        return nn.Sequential(namespace["Made"]())

    for code in ("x + 1", "x + 2", "x * 2"):
        profile_times(layer(code), torch.rand(2), 0, cpu)
    assert len(json.loads(cache_path().read_text())) == 3
