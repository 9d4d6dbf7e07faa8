"""Calls recorded as they happen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError
from intarsia.tuning import recording


class Scaled(nn.Module):
    """Takes a tensor, a flag and a number by name."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, loud: bool = False, *, by: int = 1) -> torch.Tensor:
        y = torch.relu(self.line(x)) * by
        return -y if loud else y


def test_arguments_are_copied_before_the_model_sees_them() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    model, x = Writes(), torch.zeros(3)
    with recording(model) as calls:
        model(x)
        x.fill_(7)
    assert calls.total == 1 and torch.equal(calls.args[0], torch.zeros(3))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_what_varies_becomes_a_range_and_the_rest_a_kind() -> None:
    model = Scaled().eval()
    with torch.no_grad(), recording(model) as calls:
        for size in (1, 3, 5):
            model(torch.randn(size, 8), by=2)
        model(torch.randn(3, 8), True)
    assert calls.total == 4 and len(calls.kinds) == 2
    quiet = next(kind for kind in calls.kinds if len(kind) == 3)
    assert quiet.example.args[0].shape[0] > 1  # an example of size 1 looks like a size that is always 1
    shapes = quiet.dynamic_shapes
    assert shapes is not None and shapes["by"] is None
    assert (shapes["x"][0].min, shapes["x"][0].max) == (1, 10) and shapes["x"].keys() == {0}
    fast = intarsia.compile(model, quiet.example.args, quiet.example.kwargs, dynamic_shapes=shapes)
    for size in (1, 2, 10):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x, by=2), model(x, by=2).detach(), rtol=1e-5, atol=1e-5)


def test_numbers_that_vary_become_ranges() -> None:
    model = Scaled().eval()
    with torch.no_grad(), recording(model) as calls:
        for by in (2, 3, 4):
            model(torch.randn(2, 8), by=by)
    shapes = calls.dynamic_shapes
    assert shapes is not None and (shapes["by"].min, shapes["by"].max) == (2, 8)


def test_a_few_calls_of_each_kind_are_kept() -> None:
    model = Scaled().eval()
    with recording(model) as calls:
        for size in range(1, 20):
            model(torch.randn(size, 8))
    assert calls.total == 19 and len(calls) == 6
    shapes = calls.dynamic_shapes
    assert shapes is not None and shapes["x"][0].max == 38


def test_only_modules_are_recorded() -> None:
    with pytest.raises(InputError, match="takes a module, not a function"), recording(lambda: 0):  # type: ignore[arg-type]
        pass


def test_a_call_that_raises_is_none() -> None:
    model = nn.Linear(4, 2)
    with intarsia.recording(model) as calls:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        try:
            raise KeyError("another error, which is handled while the model runs")
        except KeyError:
            model(torch.ones(3, 4))
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
    assert calls.total == 1 and len(calls) == 1 and len(calls.kinds) == 1
    assert calls.args[0].shape == (3, 4) and calls.dynamic_shapes is None
