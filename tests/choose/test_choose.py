"""`compile(..., partition=Measured())`: what is measured, what is kept, what is remembered and left out.

Engines are real. Where a decision is checked, the times of a race are given by a table, so that the outcome
does not hang on the machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.choose import race, search
from intarsia.choose.measured import Measured
from intarsia.engines import Inductor, OnnxRuntime, PyTorch
from intarsia.errors import PartitionError

pytestmark = pytest.mark.openvino

Call = Callable[[], object]


class Net(nn.Module):
    """A stem, three equal layers with a residual, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


X = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)
FEW = Measured(budget_s=60, candidates=())  # where it does not matter how much there is to measure


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def model() -> nn.Module:
    return Net().eval()


class Races:
    """Stands in for the clock: every plan takes what the table says; `log` tells who raced."""

    def __init__(self, table: Mapping[str, float]) -> None:
        self.table, self.log = table, list[list[str]]()

    def __call__(self, calls: Mapping[str, Call], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        self.log.append(list(calls))
        for call in calls.values():
            call()
        return {name: (self.table.get(name, 9.0),) * 4 for name in calls}


def _timed(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, float]) -> Races:
    races = Races(table)
    monkeypatch.setattr("intarsia.choose.race.race_plans", races)
    return races


def _compile(model: nn.Module, measured: Measured | None = None, **more: Any) -> intarsia.Compiled:
    more.setdefault("engines", ["openvino", "onnxruntime"])
    return intarsia.compile(
        model, (X,), partition=measured or Measured(budget_s=60), min_block_size=1, **more
    )


@pytest.mark.parametrize("best", ["openvino", "onnxruntime", "pytorch", "eager"])
def test_the_fastest_is_kept(model: nn.Module, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _timed(monkeypatch, {best: 1.0})
    fast = _compile(model, FEW)
    assert fast.plan.engines == ("pytorch" if best == "eager" else best,)
    assert fast.plan.findings.chosen == best and "not on" not in str(fast.plan)
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_disturbed_round_costs_nobody_the_last_race(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _timed(monkeypatch, {"eager": 1.0, "onnxruntime": 2.0})

    def disturbed(calls: Mapping[str, Call], *more: object, **named: object) -> dict[str, tuple[float, ...]]:
        took = races(calls, *more, **named)
        return took if len(races.log) > 1 else {**took, "eager": (90.0, 80.0, 1.0)}

    monkeypatch.setattr("intarsia.choose.race.race_plans", disturbed)
    assert _compile(model, FEW).plan.findings.chosen == "eager"


def test_explain_measures_nothing_and_says_so(model: nn.Module) -> None:
    explanation = intarsia.explain(model, (X,), partition=Measured())
    assert explanation.plan.strategy == "dependency"
    assert any("explain measures nothing" in note for note in explanation.notes)


def test_options_are_measured_and_must_win(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {"onnxruntime": 1.0, "onnxruntime, not spinning": 0.5})
    found = _compile(model).plan.findings
    assert found.chosen == "onnxruntime, not spinning"
    assert "onnxruntime, no patterns" in races.log[-1]


def test_threads_do_not_spin_in_the_way_of_other_calls() -> None:
    assert OnnxRuntime().for_objective("throughput") == OnnxRuntime(spinning=False)
    assert OnnxRuntime(spinning=True).for_objective("throughput") == OnnxRuntime(spinning=True)
    assert OnnxRuntime().for_objective("latency") == OnnxRuntime()


def test_images_in_channels_last_run_in_the_first_race(monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {"pytorch, channels_last": 1.0})
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    fast = intarsia.compile(images, (x,), partition=Measured(budget_s=60), engines=["onnxruntime"])
    assert "pytorch, channels_last" in races.log[0]
    assert fast.plan.findings.chosen == "pytorch, channels_last"
    assert not any("channels_last" in told for told in fast.plan.findings.left_out)
    torch.testing.assert_close(fast(x), images(x), rtol=1e-4, atol=1e-5)


def test_a_second_compile_measures_nothing(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {"onnxruntime": 1.0, "onnxruntime, no patterns": 0.4})
    first = _compile(model)
    count = len(races.log)
    again = _compile(model)
    assert len(races.log) == count
    assert again.plan.findings.remembered and not first.plan.findings.remembered
    assert again.plan.findings.chosen == first.plan.findings.chosen == "onnxruntime, no patterns"
    torch.testing.assert_close(again(X), model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_changes_is_measured_anew(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {})
    _compile(model, FEW)
    for change in (
        {"engines": ["onnxruntime"]},
        {"engines": [OnnxRuntime(threads=1)]},
        {"rewrite": False},
        {"torch_executed_ops": ["tanh"]},
        {"measured": Measured("throughput", budget_s=60, candidates=())},
    ):
        count = len(races.log)
        _compile(model, **{"measured": FEW, **change})
        assert len(races.log) > count, change
    count = len(races.log)
    _compile(Net(width=64).eval(), FEW)
    assert len(races.log) > count


def test_other_weights_are_not_measured_anew(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {})
    _compile(model, FEW)
    count = len(races.log)
    other = Net().eval()
    nn.init.ones_(other.head.weight)
    fast = _compile(other, FEW)
    assert len(races.log) == count
    torch.testing.assert_close(fast(X), other(X), rtol=1e-4, atol=1e-5)


def test_damaged_memory_is_measured_anew(
    model: nn.Module, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _timed(monkeypatch, {})
    _compile(model, FEW)
    path = cache / "choices.json"
    kept = json.loads(path.read_text())

    def with_numbers(value: Any, number: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_numbers(item, number) for key, item in value.items()}
        if isinstance(value, list):
            return [with_numbers(item, number) for item in value]
        return number if isinstance(value, int | float) and not isinstance(value, bool) else value

    gone = {key: {"trials": "gone"} for key in kept}
    for damaged in (gone, *(with_numbers(kept, number) for number in ("abc", None, -5.0, math.nan))):
        path.write_text(json.dumps(damaged))
        count = len(races.log)
        _compile(model, FEW)
        assert len(races.log) > count


def test_slow_engines_are_left_out_of_a_small_budget(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(monkeypatch, {})
    fast = _compile(model, Measured(budget_s=5), engines=["onnxruntime", Inductor()])
    (reason,) = [reason for reason in fast.plan.findings.left_out if reason.startswith("inductor")]
    assert "budget of 5 s" in reason
    assert f"left out: {reason}" in str(fast.plan)


def test_a_spent_budget_gives_the_first_plan(model: nn.Module) -> None:
    fast = _compile(model, Measured(budget_s=1e-6))
    assert fast.plan.findings.chosen == "openvino"
    assert any("is spent" in reason for reason in fast.plan.findings.left_out)
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


def test_more_budget_goes_on_where_less_had_to_stop(model: nn.Module) -> None:
    assert not _compile(model, Measured(budget_s=1e-6)).plan.findings.complete
    assert _compile(model, Measured(budget_s=1e-6)).plan.findings.remembered
    assert not _compile(model, Measured(budget_s=60)).plan.findings.remembered


def test_ctrl_c_returns_what_was_verified(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    races = _timed(monkeypatch, {"pytorch": 1.0})

    def interrupted(
        calls: Mapping[str, Call], *more: object, **named: object
    ) -> dict[str, tuple[float, ...]]:
        if races.log:
            raise KeyboardInterrupt
        return races(calls, *more, **named)

    monkeypatch.setattr("intarsia.choose.race.race_plans", interrupted)
    fast = _compile(model, Measured(budget_s=60, candidates=(OnnxRuntime(spinning=False),)))
    assert fast.plan.findings.chosen == "pytorch"
    torch.testing.assert_close(fast(X), model(X))
    races.log.clear()
    assert not _compile(model).plan.findings.remembered  # half a search is not kept


def test_ctrl_c_before_anything_was_measured(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> dict[str, tuple[float, ...]]:
        raise KeyboardInterrupt

    monkeypatch.setattr("intarsia.choose.race.race_plans", interrupted)
    fast = _compile(model)
    assert "nothing was measured" in str(fast.plan)
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


def test_require_full_compilation_is_kept(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    _timed(monkeypatch, {"pytorch": 0.1})
    fast = _compile(model, require_full_compilation=True)
    assert "pytorch" not in fast.plan.engines
    with pytest.raises(PartitionError, match="require_full_compilation"):
        _compile(model, require_full_compilation=True, torch_executed_ops=["tanh"])


def test_a_model_that_writes_is_not_written_to_by_measuring() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x) * self.calls

    counter = Counter().eval()
    fast = _compile(counter, Measured(budget_s=2))
    assert counter.calls.item() == 0
    fast(X)
    assert counter.calls.item() == 1


def test_measured_for_real(model: nn.Module) -> None:
    fast = _compile(model, FEW, engines=["onnxruntime"])
    found = fast.plan.findings
    last = [trial for trial in found.trials if trial.final]
    assert found.trial(found.chosen) in last
    assert {"eager", "pytorch", "onnxruntime"} <= {trial.name for trial in found.trials}
    told = json.loads(fast.plan.to_json())
    assert told["measured"]["chosen"] == found.chosen
    assert [s["engine"] for s in told["segments"]] == [s.engine for s in fast.plan.segments]
    assert "measured end to end" in str(fast.plan)


def test_throughput_is_measured_at_the_largest_batch_by_several_threads(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    sizes: set[int] = set()
    import threading

    original = intarsia.Compiled.results

    def results(self: intarsia.Compiled, inputs: Any) -> Any:
        threads.add(threading.get_ident())
        sizes.add(inputs[0].shape[0])
        return original(self, inputs)

    monkeypatch.setattr(intarsia.Compiled, "results", results)
    fast = _compile(
        model,
        Measured("throughput", budget_s=5, candidates=()),
        engines=["onnxruntime"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=128)},),
    )
    assert len(threads) >= race.callers()
    assert sizes == {128}
    for batch in (1, 5, 128):
        x = torch.randn(batch, 16)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"objective": "speed"}, "objective='speed' is not known; known are latency, throughput"),
        ({"budget_s": 0}, "budget_s=0 must be more than 0"),
        ({"budget_s": "3"}, "budget_s='3' must be more than 0"),
        ({"candidates": ["openvino"]}, "'openvino', which is not an engine"),
        ({"candidates": PyTorch()}, r"PyTorch\(.*\) is one engine; give a list"),
    ],
)
def test_wishes_that_cannot_be_met(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Measured(**wrong)


@pytest.mark.parametrize("behind", [1.2, 1.5])
def test_options_of_an_engine_that_is_close_behind_may_win(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, behind: float
) -> None:
    _timed(monkeypatch, {"openvino": 1.0, "onnxruntime": behind, "onnxruntime, not spinning": 0.8})
    assert _compile(model).plan.findings.chosen == "onnxruntime, not spinning"


def test_without_patterns_only_what_may_still_win_is_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timed(monkeypatch, {"openvino": 1.0, "onnxruntime": 1.5})
    names = {trial.name for trial in _compile(model).plan.findings.trials}
    assert "onnxruntime, not spinning" in names and "onnxruntime, no patterns" not in names


def test_a_plan_left_out_of_the_last_race_that_seems_faster_is_let_in_again(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"openvino": 2.0, "onnxruntime": 2.1, "pytorch": 2.2, "eager": 2.3}
    races = Races(slow)

    def raced(calls: Mapping[str, Call], *rest: object, **more: object) -> dict[str, tuple[float, ...]]:
        busy = {"openvino": 2.5, "onnxruntime": 2.4}
        quiet = {**slow, "pytorch": 1.5}
        races.table = [slow, busy, quiet][len(races.log)]
        return races(calls, *rest, **more)

    monkeypatch.setattr("intarsia.choose.race.race_plans", raced)
    monkeypatch.setattr(race.Standings, "fits_a_race", lambda *_: True)
    monkeypatch.setattr(search.Search, "_mixes", lambda _: [])
    fast = _compile(model, FEW, rewrite=False)
    assert [sorted(names) for names in races.log] == [
        sorted(slow),
        ["onnxruntime", "openvino"],  # calls of two seconds: the nearest two
        sorted(slow),
    ]
    assert fast.plan.findings.chosen == "pytorch"


def test_a_simpler_plan_that_is_slower_is_raced_once_more(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two disturbed rounds of four kept the simpler of two plans, though the other is 8 % faster."""
    races: list[list[str]] = []

    def raced(calls: Mapping[str, Call], *_: object, **__: object) -> dict[str, tuple[float, ...]]:
        races.append(sorted(calls))
        rounds = 8 if len(races) == 3 else 4
        steady = {"openvino": (0.120,) * rounds, "onnxruntime": (0.111,) * rounds}
        if len(races) == 2:
            steady["onnxruntime"] = (0.111, 0.111, 0.113, 0.140)
            steady["openvino"] = (0.120, 0.120, 0.112, 0.121)
        return {name: steady.get(name, (0.300,) * rounds) for name in calls}

    monkeypatch.setattr("intarsia.choose.race.race_plans", raced)
    monkeypatch.setattr(race.Standings, "fits_a_race", lambda *_: True)
    monkeypatch.setattr(search.Search, "_mixes", lambda _: [])
    fast = _compile(model, FEW, rewrite=False)
    assert races[1:] == [["onnxruntime", "openvino"]] * 2
    assert fast.plan.findings.chosen == "onnxruntime"


def test_a_last_race_on_a_busy_machine_is_run_again(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = {"openvino": 1.0, "onnxruntime": 1.4, "pytorch": 5.0, "eager": 5.0}
    races = Races(quiet)

    def raced(calls: Mapping[str, Call], *rest: object, **more: object) -> dict[str, tuple[float, ...]]:
        races.table = {"openvino": 117.0} if len(races.log) == 1 else quiet
        return races(calls, *rest, **more)

    monkeypatch.setattr("intarsia.choose.race.race_plans", raced)
    monkeypatch.setattr(race.Standings, "fits_a_race", lambda *_: True)
    fast = _compile(model, Measured(budget_s=60, candidates=[intarsia.OpenVINO(threads=1)]))
    assert len(races.log[0]) == 4 and sorted(races.log[2]) == sorted([*races.log[1], "onnxruntime"])
    found = json.loads(fast.plan.to_json())["measured"]
    times = {trial["name"]: trial["seconds"][0] for trial in found["trials"]}
    assert found["chosen"] == "openvino" and times["openvino"] == 1.0 and times["onnxruntime"] == 1.4
