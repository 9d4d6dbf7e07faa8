"""What capture freezes is told in the notes, and nothing else is."""

from __future__ import annotations

import gc
import random
import re
import sys
import time
from datetime import datetime
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.frozen_state import watched


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
    assert "inner.n" in told and "seen" in told and "stays as it" in told


def test_without_verification_it_is_told_too() -> None:
    told = notes_of(Counts(), verify=False)
    assert "inner.n" in told and "seen" in told and "stays as it" in told
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
        (lambda: time.time(), r"reads the clock \(time\) at .*test_frozen_state.py"),
        (lambda: datetime.now().timestamp(), r"reads the clock \(now\)"),
    ],
)
def test_numbers_from_outside_torch_are_told(function: Any, told: str) -> None:
    model, x = Calls(function), torch.rand(3)
    with watched(model) as notes:
        model(x)
    assert len(notes) == 1
    assert re.search(told, notes[0])
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
        with watched(model := Collects()) as notes:
            model(torch.ones(1))
    finally:
        gc.callbacks.remove(callback)
    assert notes == []
