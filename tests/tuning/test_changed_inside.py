"""A module in place of which a program answers, changed inside: the model's own answer, as eager's."""

from __future__ import annotations

import argparse
import copy
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError

X = torch.linspace(-1, 1, 128).reshape(2, 64)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64)).eval()


def _hook(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda _, __, made: made + 1)


def _pre_hook(model: nn.Sequential) -> None:
    model[0].register_forward_pre_hook(lambda _, given: (given[0] * 2,))


def _replace(model: nn.Sequential) -> None:
    model[0] = nn.Linear(64, 64)


def _append(model: nn.Sequential) -> None:
    model.append(nn.Linear(64, 64))


def _drop(model: nn.Sequential) -> None:
    model[2].train()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_hook, "0 has a hook that was added after compiling"),
        (_pre_hook, "0 has a hook that was added after compiling"),
        (_replace, "the model itself has other modules than when it was compiled"),
        (_append, "the model itself has other modules than when it was compiled"),
        (_drop, r"2 has another training mode than when it was compiled"),
    ],
)
@torch.no_grad()
def test_the_answer_is_the_changed_models(change: Callable[[nn.Sequential], None], sentence: str) -> None:
    model = _model()
    tuned = intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1)
    before = model(X)
    change(model)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"runs in PyTorch for this call: {sentence}"):
        made = model(X)
    tuned.restore()
    torch.manual_seed(1)
    assert torch.equal(made, model(X)) and not torch.allclose(made, before)


class _Scaled(nn.Module):
    """Reads a number, a tensor that is not a buffer, a configuration, and a flag of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = _model(), nn.LayerNorm(64)
        self.scale, self.table = 2.0, torch.ones(64)
        self.shift, self.count = 0.0, 1
        self.config = argparse.Namespace(negate=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(self.first(x)) * self.scale + self.table
        made = made + math.copysign(1, self.shift) + isinstance(self.count, float)
        return -made if self.config.negate else made


def _scale(model: _Scaled) -> None:
    model.scale = 5.0


def _table(model: _Scaled) -> None:
    model.table = torch.zeros(64)


def _sign(model: _Scaled) -> None:
    model.shift = -0.0


def _kind(model: _Scaled) -> None:
    model.count = 1.0


def _negate(model: _Scaled) -> None:
    model.config.negate = True


def _eps(model: _Scaled) -> None:
    model.inner.eps = 10.0


def _forward(model: _Scaled) -> None:
    model.inner.forward = lambda x: x + 1  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_scale, _table, _sign, _kind, _negate, _eps, _forward])
@torch.no_grad()
def test_attributes_are_read_as_they_are(change: Callable[[_Scaled], None]) -> None:
    model = _Scaled().eval()
    tuned = intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1)
    (placed,) = tuned.placed.values()
    before = model(X)
    assert placed.refused is None
    change(model)
    with pytest.warns(UserWarning, match="has another value than when it was compiled|was replaced"):
        made = model(X)
    tuned.restore()
    assert torch.equal(made, model(X)) and not torch.allclose(made, before)


@torch.no_grad()
def test_an_equal_number_is_the_same_setting() -> None:
    model = _Scaled().eval()
    tuned = intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1)
    (placed,) = tuned.placed.values()
    model.scale = float("2.0")
    model(X)
    assert placed.refused is None


@torch.no_grad()
def test_programs_answer_again_once_a_hook_is_gone() -> None:
    model = _model()
    tuned = intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1)
    (placed,) = tuned.placed.values()
    handle = model[0].register_forward_hook(lambda _, __, made: made + 1)
    with pytest.warns(UserWarning, match="hook"):
        model(X)
    handle.remove()
    assert placed.enabled
    torch.testing.assert_close(model(X), placed.own(X))


def test_a_call_that_fails_while_it_is_measured_leaves_nothing_in_place() -> None:
    model, calls = _model(), [0]

    def call() -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise ZeroDivisionError("mine")
        model(X)

    with torch.no_grad(), pytest.raises(ZeroDivisionError, match="mine"):
        intarsia.tune(model, call, only_if_faster=False)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("wrong", [{"least_share": float("nan")}, {"least_share": -1}, {"rounds": 0}])
def test_what_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        intarsia.tune(_model(), lambda: None, **wrong)


def test_nothing_recorded_is_said() -> None:
    with intarsia.recording(_model()) as calls:
        pass
    with pytest.raises(InputError, match="no call was recorded"):
        calls.args  # noqa: B018


@torch.no_grad()
def test_others_may_ask_what_forward_takes_and_export_it() -> None:
    model = _model()
    expected, signature = model(X), inspect.signature(model.forward)
    with intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1) as tuned:
        assert tuned.placed and inspect.signature(model.forward) == signature
        with intarsia.recording(model) as calls:
            model(X), model(X[:1])
        assert set(calls.dynamic_shapes or ()) == set(signature.parameters)
        for strict in (True, False):
            program = torch.export.export(model, (X,), strict=strict)
            torch.testing.assert_close(program.module()(X), expected)


@torch.no_grad()
def test_a_copy_runs_as_it_is() -> None:
    model = _Scaled().eval()
    with intarsia.tune(model, lambda: model(X), only_if_faster=False, rounds=1):
        with pytest.warns(UserWarning, match="a copy of _Scaled is not compiled"):
            copied = copy.deepcopy(model)
        before = model(X)
        torch.testing.assert_close(copied(X), before)
        copied.scale = 5.0
        made = copied(X)
        assert torch.equal(model(X), before)
    assert not torch.allclose(made, before)
