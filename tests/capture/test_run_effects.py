"""What a run does that a graph does not repeat is honoured or warned about, and nothing else is."""

from __future__ import annotations

import gc
import itertools
import random
import re
import sys
import time
import warnings
from datetime import datetime
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.run_effects import watched
from intarsia.errors import CaptureError, DifferenceWarning


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.n = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.n += 1
        self.seen.append(1)
        return x * self.inner.n


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.function())


def notes_of(model: nn.Module, verify: bool = True) -> str:
    return "\n".join(intarsia.compile(model, (torch.rand(3),), verify=verify).notes)


def test_attributes_that_change_are_told() -> None:
    model = Counts()
    told = notes_of(model)
    assert "inner.n" in told and "seen" in told and "test_run_effects.py:33" in told


def test_without_verification_it_is_told_too() -> None:
    told = notes_of(Counts(), verify=False)
    assert "inner.n" in told and "seen" in told and "test_run_effects.py:33" in told
    assert "draws from Python's random" in notes_of(Calls(random.random), verify=False)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 2)
    assert "hooks of 0" in notes_of(hooked, verify=False)
    assert "frozen" not in notes_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), verify=False)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (random.random, "draws from Python's random"),
        (numpy.random.rand, "draws from numpy's random"),
        (lambda: time.time(), r"reads the clock \(time\) at .*test_run_effects.py"),
        (lambda: datetime.now().timestamp(), r"reads the clock \(now\)"),
    ],
)
def test_numbers_from_outside_torch_are_told(function: Any, told: str) -> None:
    model, x = Calls(function), torch.rand(3)
    with watched(model) as effects:
        model(x)
    assert len(effects) == 1
    assert re.search(told, effects[0].text)
    assert re.search(told, notes_of(model))


def test_hooks_are_told() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    fast = intarsia.compile(model, (torch.ones(3),))
    torch.testing.assert_close(fast(torch.ones(3)), model(torch.ones(3)).detach())
    assert any("hooks of 0" in note for note in fast.notes)


def test_a_plain_model_has_no_such_note_and_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fast = intarsia.compile(model, (torch.ones(3),))
    assert not any("frozen" in note for note in fast.notes)
    assert not model._forward_hooks and not model._forward_pre_hooks and sys.getprofile() is None


def test_a_model_that_fails_leaves_no_profiler() -> None:
    def fails() -> float:
        raise ValueError("no")

    model = Calls(fails)
    with watched(model), pytest.raises(ValueError):
        model(torch.rand(1))
    assert sys.getprofile() is None and not model._forward_hooks


def test_the_clock_of_a_garbage_collection_is_not_the_models() -> None:
    class Collects(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            return x + 1

    def callback(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    gc.callbacks.append(callback)
    try:
        with watched(model := Collects()) as effects:
            model(torch.ones(1))
    finally:
        gc.callbacks.remove(callback)
    assert effects == []


X = torch.linspace(-1, 1, 12).reshape(4, 3)
CALLS = 0
TICKS = itertools.count()


class Seeds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand(x.shape)


class SeedsInPart(nn.Module):
    """Its first layer can be compiled; what seeds a generator cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 3)), Seeds()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(self.layer(x))


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_that_seeds_a_generator_draws_what_it_draws(verify: bool) -> None:
    model = Seeds()
    fast = intarsia.compile(model, (X,), verify=verify)
    assert torch.equal(fast(X), model(X))
    assert any(re.search(r"manual_seed at .*test_run_effects.py:\d+", note) for note in fast.notes)
    with pytest.raises(CaptureError, match="manual_seed"):
        intarsia.compile(model, (X,), fallback="error")


def test_what_does_not_seed_is_compiled_all_the_same() -> None:
    model = SeedsInPart().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(X), model(X).detach())
    assert list(fast.parts) == ["layer"]


class Appends(nn.Module):
    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], more: dict[str, Any]) -> torch.Tensor:
        cache.append(x * 2)
        more["last"] = cache[0]
        return x + cache[0]


class Replaces(nn.Module):
    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], more: dict[str, Any]) -> torch.Tensor:
        cache[0] = x * 2
        return x + 1


@pytest.mark.parametrize("model", [Appends(), Replaces()])
def test_what_is_put_into_an_argument_is_there_for_the_caller(model: nn.Module) -> None:
    fast = intarsia.compile(model, (X,), {"cache": [X], "more": {}})
    ours, theirs = ([X], {"given": X}), ([X], {"given": X})
    assert torch.equal(fast(X, *ours), model(X, *theirs))
    assert len(ours[0]) == len(theirs[0]) and ours[1].keys() == theirs[1].keys()
    assert all(map(torch.equal, ours[0], theirs[0]))


class ChecksItem(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.sum().to(torch.int64).item()
        torch._check(n < 5, lambda: "less than 5")
        return x * 2 + n


class ChecksValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 2).all())
        return torch.relu(x * 2) + 1


class ChecksSaying(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 2).all(), "all less than 2")
        return torch.relu(x * 2) + 1


@pytest.mark.parametrize("model", [ChecksItem(), ChecksValues(), ChecksSaying()])
def test_checks_of_values_still_raise(model: nn.Module) -> None:
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(X), model(X))
    assert "onnxruntime" in fast.plan.engines
    for called in (model, fast):
        with pytest.raises(RuntimeError):
            called(X + 9)


class CountsGlobally(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return torch.relu(x)


class CountsInClass(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return torch.relu(x)


class Statistics:
    calls = 0


class CountsInObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics.calls += 1
        return torch.relu(x)


class CountsSilently(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(self.calls)
        return torch.relu(x)


def counts_in_cell() -> nn.Module:
    calls = 0

    class CountsInCell(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return torch.relu(x)

    return CountsInCell()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (CountsGlobally(), "CALLS"),
        (CountsInClass(), "calls"),
        (CountsInObject(), "statistics"),
        (CountsSilently(), "calls"),
        (counts_in_cell(), "calls"),
    ],
)
def test_state_that_changes_no_answer_yet_is_a_warning_with_its_line(model: nn.Module, name: str) -> None:
    where = rf"{name}, which a run of the model changes at .*test_run_effects.py:\d+"
    with pytest.warns(DifferenceWarning, match=where) as caught:
        fast = intarsia.compile(model, (X,))
    assert caught[0].filename == __file__
    assert torch.equal(fast(X), model(X))


class Ticks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + next(TICKS)


class CountsAndAdds(CountsGlobally):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + CALLS


@pytest.mark.parametrize("model", [Ticks(), CountsAndAdds()])
def test_state_that_answers_depend_on_is_honoured(model: nn.Module) -> None:
    fast = intarsia.compile(model, (X,))
    first, second = fast(X), fast(X)
    torch.testing.assert_close(second - first, torch.ones_like(X))


class FillsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(3.0)
        return torch.relu(x + self.table)


def test_a_cache_that_the_first_run_fills_is_a_note() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        fast = intarsia.compile(FillsCache(), (X,))
    assert any("table, which a run of the model changes" in note for note in fast.notes)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "BatchNorm1d x1"),
        (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), "Dropout x1"),
        (nn.LSTM(3, 4, num_layers=2, dropout=0.5), "LSTM x1"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_model_in_training_mode_is_a_warning(model: nn.Module, named: str, verify: bool) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    with pytest.warns(DifferenceWarning, match=rf"training mode \({named}\).*Call model.eval\(\)") as caught:
        intarsia.compile(model, (X,), verify=verify)
    assert __file__ in [one.filename for one in caught if issubclass(one.category, DifferenceWarning)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        intarsia.compile(model.eval(), (X,), verify=verify)
        intarsia.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (X,), verify=verify)
