"""`compile(model, args)` measures: on a CPU, where no engine and no order is named, and where it can pay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.layouts import Compressed
from torch import nn

import intarsia
from intarsia.choose import measured
from intarsia.choose.measured import Measured
from intarsia.engines import Inductor, OnnxRuntime, OpenVINO
from intarsia.engines.inductor import engine as inductor_engine
from intarsia.errors import InputError, IntarsiaError

Call = Callable[[], object]
SMALL, LARGE = 8, 1024  # the second is above a hundred megaflops


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(autouse=True)
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    monkeypatch.setenv("INTARSIA_MEASURE", "1")


class Races:
    """Every plan takes what the table says; `log` tells who raced."""

    def __init__(self, table: Mapping[str, float]) -> None:
        self.table, self.log, self.least = table, list[list[str]](), list[object]()

    def __call__(self, calls: Mapping[str, Call], *_: object, **how: object) -> dict[str, tuple[float, ...]]:
        self.log.append(list(calls))
        self.least.append(how["least"])
        return {name: (self.table.get(name, 9e-9),) * 4 for name in calls}


def _races(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, float]) -> Races:
    races = Races(table)
    monkeypatch.setattr("intarsia.choose.race.race_plans", races)
    return races


def _x(width: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 32 * width).reshape(32, width)


@pytest.mark.openvino
@pytest.mark.usefixtures("no_hurry")
def test_the_default_measures_every_quick_engine_and_the_model_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    races = _races(monkeypatch, {"onnxruntime": 1e-9})
    model = Net(LARGE).eval()
    fast = intarsia.compile(model, (_x(LARGE),))
    assert {"openvino", "onnxruntime", "pytorch", "eager"} <= set(races.log[0])
    assert fast.plan.findings.chosen.startswith("onnxruntime")
    torch.testing.assert_close(fast(_x(LARGE)), model(_x(LARGE)), rtol=1e-4, atol=1e-4)
    count = len(races.log)
    again = intarsia.compile(model, (_x(LARGE),))
    assert again.plan.findings.remembered and len(races.log) == count


@pytest.mark.usefixtures("no_hurry")
def test_nobody_loses_against_eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _races(monkeypatch, {"eager": 1e-9})
    model, x = Net(LARGE).eval(), _x(LARGE)
    fast = intarsia.compile(model, (x,))
    assert fast.plan.findings.chosen == "eager"
    torch.testing.assert_close(fast(x), model(x))
    # Whatever holds for a compiled module holds for it, wherever the clock sent it.
    with pytest.raises(InputError, match="shape"):
        fast(torch.ones(3, LARGE))
    intarsia.save(fast, tmp_path / "eager.intarsia")
    torch.testing.assert_close(intarsia.load(tmp_path / "eager.intarsia")(x), model(x), rtol=1e-4, atol=1e-4)
    other = Net(LARGE).eval()
    with torch.no_grad():
        other.layers[0].weight.mul_(2)
    fast.refit(other)
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-4)


def test_changed_weights_are_an_error_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"eager": 1e-9})
    model, x = Net(LARGE).eval(), _x(LARGE)
    fast = intarsia.compile(model, (x,))
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    with pytest.raises(IntarsiaError, match="weight"):
        fast(x)


@pytest.mark.parametrize(
    "named",
    [{"engines": ["onnxruntime"]}, {"partition": "dependency"}, {"backend_priority": ["onnxruntime"]}],
)
def test_an_order_that_is_named_is_kept(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    races = _races(monkeypatch, {})
    fast = intarsia.compile(Net(LARGE).eval(), (_x(LARGE),), **named)
    assert not races.log and not hasattr(fast.plan, "findings")


def test_a_small_model_is_not_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    races = _races(monkeypatch, {})
    fast = intarsia.compile(Net(SMALL).eval(), (_x(SMALL),))
    assert not races.log
    assert any("units of work; plans are measured from" in note for note in fast.notes)
    intarsia.compile(Net(SMALL).eval(), (_x(SMALL),), partition=Measured())
    assert races.log


def test_the_environment_may_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    races = _races(monkeypatch, {})
    monkeypatch.setenv("INTARSIA_MEASURE", "0")
    assert not intarsia.compile(Net(LARGE).eval(), (_x(LARGE),)).notes
    assert not races.log
    monkeypatch.setenv("INTARSIA_MEASURE", "no")
    with pytest.raises(InputError, match="INTARSIA_MEASURE='no'"):
        intarsia.compile(Net(LARGE).eval(), (_x(LARGE),))


@pytest.mark.openvino
def test_patterns_that_are_named_are_not_left_out_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    races = _races(monkeypatch, {"openvino": 1e-9})
    intarsia.compile(Net(LARGE).eval(), (_x(LARGE),), rewrite=["identity"])
    assert not [name for names in races.log for name in names if "no patterns" in name]


@pytest.mark.openvino
@pytest.mark.parametrize(
    ("seconds", "budget_s", "least"), [(0.001, 300, {9}), (0.1, 300, {4, 5}), (2.0, 300, {4}), (2.0, 20, {1})]
)
def test_the_last_race_has_more_rounds_where_they_take_little(
    seconds: float, budget_s: float, least: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _races(monkeypatch, dict.fromkeys(("openvino", "onnxruntime", "pytorch", "eager"), seconds))
    only = Measured(budget_s=budget_s, candidates=())
    intarsia.compile(Net(LARGE).eval(), (_x(LARGE),), engines=["openvino", "onnxruntime"], partition=only)
    assert races.least[-1] in least, races.log  # an engine has other options on some processors


@pytest.mark.openvino
def test_slow_engines_wait_for_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"openvino": 1e-9})
    found = intarsia.compile(Net(LARGE).eval(), (_x(LARGE),), partition=Measured()).plan.findings
    assert any(
        reason.startswith("inductor: it is slow to build, and tried only with") for reason in found.left_out
    )


def test_a_plan_that_fails_while_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = intarsia.Compiled.results

    def results(self: intarsia.Compiled, inputs: Any) -> Any:
        if "onnxruntime" in self.plan.engines:
            raise MemoryError("no more")
        return original(self, inputs)

    monkeypatch.setattr(intarsia.Compiled, "results", results)
    model = Net(LARGE).eval()
    fast = intarsia.compile(model, (_x(LARGE),), partition=Measured(budget_s=30, candidates=()))
    assert "onnxruntime" not in fast.plan.engines
    assert any(
        "onnxruntime: it failed during measurement: MemoryError: no more" in reason
        for reason in fast.plan.findings.left_out
    )


def test_the_budget_is_kept_when_calls_are_slow(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = intarsia.Compiled.results

    def results(self: intarsia.Compiled, inputs: Any) -> Any:
        clock(0.3)
        return original(self, inputs)

    monkeypatch.setattr(intarsia.Compiled, "results", results)
    found = intarsia.compile(Net(LARGE).eval(), (_x(LARGE),), partition=Measured(budget_s=1.5)).plan.findings
    # One round of everybody is always run: four plans and their first calls, of 0.3 s each.
    assert found.spent_s < 1.5 + 3.0


def _token(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.Tensor]:
    """A model in bfloat16 that reads its weights for one row, and is worth measuring."""
    monkeypatch.setattr(measured, "LEAST_WORK", 0.0)
    return Net(128).bfloat16().eval(), torch.randn(1, 128).bfloat16()


@pytest.mark.skipif(Inductor().unavailable() is not None, reason="Inductor is not usable here")
def test_a_slow_engine_that_is_known_to_pay_needs_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"inductor": 1e-9})
    model, x = _token(monkeypatch)
    fast = intarsia.compile(model, (x,))
    assert fast.plan.engines == ("inductor",)
    torch.testing.assert_close(fast(x), model(x), rtol=2**-6, atol=2**-8)
    fast.refit({name: value * 2 for name, value in model.state_dict().items()})
    assert fast.plan.engines == ("inductor",)
    doubled = Net(128).bfloat16().eval()
    doubled.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    torch.testing.assert_close(fast(x), doubled(x), rtol=2**-6, atol=2**-8)


@pytest.mark.skipif(Inductor().unavailable() is not None, reason="Inductor is not usable here")
def test_nor_does_it_on_a_processor_with_tiles_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"inductor": 1e-9})
    monkeypatch.setattr(inductor_engine, "has_bfloat16_tiles", lambda: True)
    model, x = _token(monkeypatch)
    rows = torch.export.Dim("rows", min=2, max=8)
    fast = intarsia.compile(model, (x.repeat(4, 1),), dynamic_shapes=({0: rows},))
    assert fast.plan.engines == ("inductor",)
    for count in (2, 3, 8):
        given = torch.randn(count, 128).bfloat16()
        torch.testing.assert_close(fast(given), model(given), rtol=2**-6, atol=2**-8)


@pytest.mark.openvino
def test_it_waits_where_several_rows_read_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"openvino": 1e-9})
    model, x = _token(monkeypatch)
    monkeypatch.setattr(inductor_engine, "has_bfloat16_tiles", lambda: False)
    found = intarsia.compile(model, (x.repeat(2, 1),)).plan.findings
    assert any(reason.startswith("inductor: it is slow to build") for reason in found.left_out)


def test_no_slow_engine_takes_part_in_the_usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sorted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(super().forward(x).float())  # which engines refuse

    fast = intarsia.compile(Sorted(SMALL).bfloat16().eval(), (_x(SMALL).bfloat16(),))
    assert any("units of work; plans are measured from" in note for note in fast.notes)
    assert "pytorch" in fast.plan.engines and "inductor" not in fast.plan.engines


@pytest.mark.usefixtures("no_hurry")
def test_a_model_on_a_gpu_is_measured_as_it_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever is on a GPU is tried as a CUDA graph; without one here, a note says that it cannot be.
    monkeypatch.setattr("intarsia.compiler.assembler.uses_gpu", lambda graph: True)
    x = torch.randn(4, LARGE)
    fast = intarsia.compile(Net(LARGE), (x,), engines=["pytorch"], partition=Measured(), rewrite=False)
    assert {trial.name for trial in fast.plan.findings.trials} == {"pytorch", "eager"}
    assert fast.plan.findings.chosen == "eager" or any("CUDA graph" in note for note in fast.notes)


def test_measuring_leaves_no_trace_in_the_model() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model, plain = Counting(LARGE).eval(), Counting(LARGE).eval()
    intarsia.compile(plain, (_x(LARGE),), partition="dependency")  # capture runs `forward` once
    state = torch.get_rng_state()
    intarsia.compile(model, (_x(LARGE),), partition=Measured(budget_s=5, candidates=()))
    assert model.calls == plain.calls and torch.equal(torch.get_rng_state(), state)


@pytest.mark.openvino
@pytest.mark.usefixtures("no_hurry")
def test_a_plan_that_memory_has_no_room_for_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    _races(monkeypatch, {"openvino": 1e-9})
    monkeypatch.setattr("intarsia.choose.race.free_bytes", lambda: 2**20)
    found = intarsia.compile(Net(LARGE).eval(), (_x(LARGE),)).plan.findings
    assert "onnxruntime: it may take 0.0 GiB of memory, and 0.0 GiB are free" in found.left_out
    assert {trial.name for trial in found.trials} == {"openvino", "pytorch", "eager"}


@pytest.mark.openvino
@pytest.mark.parametrize("best", ["openvino", "onnxruntime", "openvino, no patterns", "pytorch"])
def test_one_program_with_weights_in_few_bits_is_held_while_another_is_built(
    best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _races(monkeypatch, {"openvino": 1.05e-9, best: 1e-9})
    monkeypatch.setattr("intarsia.runtime.weights._LARGE", 1)
    programs: list[weakref.ref[Any]] = []
    held: list[int] = []

    def counting(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def counted(engine: Any, net: Any) -> Any:
            program = build(engine, net)
            if sum(layer.kind.endswith("MatMulNBits") for layer in net.get_layers()) == 2:  # no block of it
                held.append(sum(other() is not None for other in programs))
                programs.append(weakref.ref(program))
            return program

        return counted

    for engine in (OpenVINO, OnnxRuntime):
        monkeypatch.setattr(engine, "build", counting(engine.build))
    model = nn.Sequential(Compressed(16, 64, 16, 4), nn.GELU(), Compressed(64, 64, 16, 4)).eval()
    x = torch.linspace(-1, 1, 128).reshape(8, 16)
    measured = Measured(budget_s=60)
    engines = ["openvino", "onnxruntime"]
    fast = intarsia.compile(model, (x,), engines=engines, partition=measured, min_block_size=1)
    assert fast.plan.findings.chosen == best
    assert len(held) > 1 and max(held) < 2
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_sizes_that_are_measured_at_are_part_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    races = _races(monkeypatch, {})
    model, x = Net(64).eval(), _x(64)
    for largest in (64, 128):
        count = len(races.log)
        sizes = ({0: torch.export.Dim("batch", min=2, max=largest)},)
        measured = Measured("throughput", budget_s=30, candidates=())
        intarsia.compile(model, (x,), engines=["onnxruntime"], dynamic_shapes=sizes, partition=measured)
        assert len(races.log) > count
