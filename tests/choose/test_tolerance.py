"""`compile(..., tolerance=...)`: shorter arithmetic where it is faster, never beyond the error allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.choose.candidate import Workshop
from intarsia.choose.measured import Measured
from intarsia.compare import relative_error
from intarsia.engines import (
    OnnxRuntimeInt4Weights,
    OnnxRuntimeInt8,
    OnnxRuntimeInt8Weights,
    OpenVINOBf16,
    OpenVINOInt4Weights,
    OpenVINOInt8Weights,
)
from intarsia.engines.building import OutOfTime
from intarsia.errors import InputError

Call = Callable[[], object]
SHORT = [engine for engine in (OpenVINOBf16(), OnnxRuntimeInt8()) if engine.unavailable() is None]
WEIGHTS = [
    OnnxRuntimeInt8Weights(),
    OnnxRuntimeInt4Weights(),
    OpenVINOInt8Weights(),
    OpenVINOInt4Weights(),
]
X = torch.linspace(-1, 1, 32 * 64).reshape(32, 64)


class Net(nn.Module):
    """Layers of which the second amplifies: its error is by far the largest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))


@pytest.fixture
def model() -> nn.Module:
    return Net().eval()


def _prefer(monkeypatch: pytest.MonkeyPatch, name: str) -> list[list[str]]:
    """Races in which plans of this name are ten times as fast as others."""
    log: list[list[str]] = []

    def race(calls: Mapping[str, Call], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        log.append(list(calls))
        return {one: (1e-9 if one.startswith(name) else 1e-8,) * 4 for one in calls}

    monkeypatch.setattr("intarsia.choose.race.race_plans", race)
    return log


def _error(fast: Any, model: nn.Module) -> float:
    """The largest error of a row, as a share of its largest value."""
    return relative_error(fast(X), model(X), rows=len(X))


def _compile(model: nn.Module, **more: Any) -> Any:
    more.setdefault("partition", Measured(budget_s=60, candidates=()))
    if "engines" not in more and "tolerance" in more:  # the others are tried where engines are named
        more.setdefault("precision", SHORT[0].arithmetic)
    more.setdefault("engines", [SHORT[0].family])
    return intarsia.compile(model, (X,), min_block_size=1, **more)


@pytest.mark.parametrize("engine", SHORT, ids=lambda engine: engine.name)
def test_shorter_arithmetic_within_the_tolerance(
    model: nn.Module, engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = _prefer(monkeypatch, engine.name)
    own: dict[str, Any] = {"engines": [engine.family]}
    if engine.family == "openvino":
        own["precision"] = engine.arithmetic
    fast = _compile(model, tolerance=0.05, **own)
    found = fast.plan.findings
    assert found.chosen == engine.name and fast.plan.engines == (engine.name,)
    error = _error(fast, model)
    assert 1e-6 < error <= 0.05
    assert found.trial(engine.name).error == pytest.approx(error, rel=0.5)
    assert f"tolerance={0.05:g}" in str(fast.plan) and "error of the segment from" in str(fast.plan)
    count = len(log)
    assert _compile(model, tolerance=0.05, **own).plan.findings.remembered and len(log) == count
    intarsia.save(fast, tmp_path / "short.intarsia")
    assert torch.equal(intarsia.load(tmp_path / "short.intarsia")(X), fast(X))


@pytest.mark.parametrize("engine", WEIGHTS, ids=lambda engine: engine.name)
def test_short_weights_within_the_tolerance_alone(
    model: nn.Module, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prefer(monkeypatch, engine.name)
    own = {"engines": [engine.family], "precision": engine.arithmetic}
    fast = _compile(model, tolerance=0.3, **own)
    assert fast.plan.findings.chosen == engine.name and fast.plan.engines == (engine.name,)
    error = _error(fast, model)
    assert 1e-4 < error <= 0.3
    assert fast.plan.findings.trial(engine.name).error == pytest.approx(error, rel=0.5)
    assert "error of the segment from" in str(fast.plan)
    exact = _compile(model, tolerance=1e-6, **own)
    # At most blocks without a product are left to it.
    assert exact.plan.findings.chosen != engine.name and _error(exact, model) <= 1e-6
    assert any(reason.startswith(f"{engine.name}: its error is") for reason in exact.plan.findings.left_out)


@pytest.mark.openvino
def test_what_is_missing_for_short_weights_is_told(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenVINOInt8Weights, "unavailable", lambda self: "nncf is not installed")
    fast = _compile(model, tolerance=0.3, engines=["openvino"], precision="int8-weights")
    assert "openvino-int8-weights is not tried: nncf is not installed" in fast.notes


def test_what_is_too_far_off_is_not_taken(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    _prefer(monkeypatch, SHORT[0].name)
    fast = _compile(model, tolerance=1e-6)
    assert fast.plan.findings.chosen not in ("openvino-bf16", "onnxruntime-int8")
    assert any("its error is" in reason for reason in fast.plan.findings.left_out)
    assert _error(fast, model) <= 1e-6


def test_a_row_of_large_values_excuses_no_other(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic int8 has one scale for all activations: 7 rows of 8 were off by as much as they hold."""
    _prefer(monkeypatch, "onnxruntime-int8")
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    rows[3] *= 1000
    asked: dict[str, Any] = {"engines": ["onnxruntime"], "precision": "int8", "min_block_size": 1}
    measured = Measured(budget_s=60, candidates=())
    fast = intarsia.compile(model, (rows,), tolerance=0.02, partition=measured, **asked)
    assert relative_error(fast(rows), model(rows), rows=8) <= 0.02
    assert "measured on the examples, in each row of a batch" in str(fast.plan)
    even = intarsia.compile(model, (rows[:3],), tolerance=0.02, partition=measured, **asked)
    assert even.plan.findings.chosen == "onnxruntime-int8", str(even.plan)


def test_the_worst_blocks_are_kept_exact(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        torch.no_grad()
    ):  # layer 2 answers wrongly for an engine that rounds: values far larger than the rest
        model.layers[2].weight.mul_(40)
    name = SHORT[0].name
    _prefer(monkeypatch, f"{name}, blocks")
    whole = _compile(model, tolerance=0.5).plan.findings
    error = next(t.error for t in whole.trials if t.name == name)
    fast = _compile(model, tolerance=error * 0.6)
    assert fast.plan.findings.chosen.startswith(f"{name}, blocks"), str(fast.plan)
    assert name in fast.plan.engines and len(fast.plan.engines) > 1
    assert 0 < _error(fast, model) <= error * 0.6
    assert _compile(model, tolerance=error * 0.6).plan.findings.remembered


def test_blocks_of_an_arithmetic_that_is_slower_are_not_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prefer(monkeypatch, SHORT[0].family)  # and the short one, of which one call is measured, is not
    fast = _compile(model, tolerance=1e-6)
    reason, *_ = [r for r in fast.plan.findings.left_out if "some blocks exact" in r]
    assert reason.startswith(f"{SHORT[0].name}, some blocks exact: all of it takes 1e-05 ms, and")


def test_the_error_is_held_on_every_example(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    name = SHORT[0].name
    _prefer(monkeypatch, name)
    small = _compile(model, tolerance=0.5).plan.findings.trial(name).error
    worse = X * 200 + torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    both = _compile(model, tolerance=0.5, examples=[(worse,)]).plan.findings.trial(name).error
    assert both >= small > 0


def test_shorter_arithmetic_comes_before_engines_that_take_long(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    original = Workshop.build

    def build(self: Workshop, candidate: Any, *more: Any) -> Any:
        built.append(candidate.name)
        if candidate.is_slow_to_build:
            raise OutOfTime("not here")
        return original(self, candidate, *more)

    monkeypatch.setattr(Workshop, "build", build)
    _prefer(monkeypatch, SHORT[0].name)
    measured = Measured(budget_s=600, candidates=())
    _compile(model, tolerance=0.05, engines=[SHORT[0].family, "inductor"], partition=measured)
    assert built.index(SHORT[0].name) < built.index("inductor")


def test_exact_is_the_default(model: nn.Module) -> None:
    plan = _compile(model, precision="fp32", partition=Measured(budget_s=2)).plan
    assert not any(trial.error for trial in plan.findings.trials)
    assert not any("bf16" in trial.name or "int8" in trial.name for trial in plan.findings.trials)


@pytest.mark.openvino
def test_only_the_precision_that_is_named(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _prefer(monkeypatch, "openvino")
    _compile(model, tolerance=0.05, precision="int8", engines=["openvino", "onnxruntime"])
    assert "onnxruntime-int8" in log[-1] and "openvino-bf16" not in log[-1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "bf16"}, "precision='bf16' needs tolerance="),
        ({"precision": "fp8", "tolerance": 0.1}, "precision='fp8' is not known; known are fp32, bf16"),
        ({"tolerance": 0.0}, "tolerance=0.0 must be a share"),
        ({"tolerance": "0.1"}, "tolerance='0.1' must be a share"),
        ({"examples": [torch.ones(3)]}, r"examples\[0\] is a Tensor; each is the positional arguments"),
        ({"examples": [(torch.ones(7, 7, 7),)]}, r"examples\[0\]: input .* has shape \(7, 7, 7\)"),
        ({"examples": [(torch.ones(3), 2)]}, r"examples\[0\] has 2 inputs; the model is compiled for 1"),
        ({"tolerance": 0.1, "verify": False}, "needs verify=True"),
        (
            {"tolerance": 0.1, "precision": "bf16", "partition": "greedy"},
            r"precision='bf16' needs partition=Measured\(\), not 'greedy'",
        ),
    ],
)
def test_wishes_that_contradict(model: nn.Module, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _compile(model, **wrong)


def test_errors_of_other_weights_are_not_remembered(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that 8 bits cannot hold say nothing of the next ones."""
    log = _prefer(monkeypatch, "onnxruntime-int8")
    other = Net().eval()
    with torch.no_grad():
        for layer in other.layers:
            layer.weight *= 30.0
    asked: dict[str, Any] = {"tolerance": 0.05, "precision": "int8", "engines": ["onnxruntime"]}
    assert _compile(other, **asked).plan.engines != ("onnxruntime-int8",)
    count = len(log)
    good = _compile(model, **asked)
    assert len(log) > count and good.plan.engines == ("onnxruntime-int8",)
    count = len(log)
    again = _compile(model, **asked)
    assert len(log) == count and again.plan.findings.remembered
    assert again.plan.findings.trial("onnxruntime-int8").error == pytest.approx(_error(again, model), rel=0.5)


def test_engines_that_are_named_and_not_tried_are_told(model: nn.Module) -> None:
    with pytest.raises(InputError, match="onnxruntime-int8 computes in int8, and is only measured within"):
        intarsia.compile(model, (X,), engines=["onnxruntime-int8"], partition=Measured(budget_s=3))
    asked: dict[str, Any] = {"tolerance": 0.02, "partition": Measured(budget_s=3)}
    told = intarsia.compile(model, (X,), engines=["onnxruntime-int8"], precision="bf16", **asked)
    assert "onnxruntime-int8 is not tried: it computes in int8, and precision is bf16" in told.notes
    assert "onnxruntime-int8" not in str(told.plan)
    told = intarsia.compile(model, (X,), engines=["onnxruntime"], precision="bf16", **asked)
    assert "bf16 is not tried: none of the named engines computes in it" in told.notes
