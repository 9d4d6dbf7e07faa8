"""Engines that misbehave: the piece goes to the next engine or to PyTorch, and the reason is told."""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime, Program
from intarsia.errors import EngineError
from intarsia.network import Network


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.erf(torch.tanh(x * 2) + 1) - 0.5)


@dataclass(frozen=True)
class Faulty(OnnxRuntime):
    """ONNX Runtime, real but for one fault."""

    fault: str = ""
    error: type[BaseException] = RuntimeError
    broken: threading.Event = field(default_factory=threading.Event)  # set: later runs fail
    released: threading.Event = field(default_factory=threading.Event)
    name: ClassVar[str] = "faulty"

    def _fail(self, where: str) -> None:
        if self.fault == where:
            raise self.error(f"it fell over in {where}")

    def unavailable(self) -> str | None:
        self._fail("unavailable")
        return super().unavailable()

    def probe(self, net: Network) -> str | None:
        self._fail("probe")
        if self.fault == "hang in probe":
            self.released.wait(60)
        return super().probe(net)

    def build(self, net: Network) -> Program:
        self._fail("build")
        if self.fault == "hang":
            self.released.wait(60)
        program = super().build(net)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self._fail("first run")
            if self.fault == "hang in run":
                self.released.wait(60)
            if self.broken.is_set():
                self._fail("later run")
                if self.fault == "dtype":
                    return tuple(t.double() for t in program(*tensors))
                if self.fault == "shape":
                    return tuple(t.reshape(-1) for t in program(*tensors))
                if self.fault == "count":
                    return (*program(*tensors), torch.zeros(1))
            return program(*tensors)

        return run


X = torch.randn(4, 5)


def compiled(engine: Any, **options: Any) -> Any:
    return intarsia.compile(Net(), (X,), engines=[engine], min_block_size=1, **options)


@pytest.mark.parametrize("fault", ["probe", "build", "first run"])
@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, MemoryError, ValueError])
def test_whatever_is_raised_while_compiling_costs_the_piece(fault: str, error: type[Exception]) -> None:
    fast = compiled(Faulty(fault=fault, error=error))
    torch.testing.assert_close(fast(X), Net()(X))
    assert fast.plan.engines == ("pytorch",)
    assert f"{error.__name__}: it fell over in {fault}" in str(fast.plan)


@pytest.mark.openvino
def test_the_next_engine_takes_over() -> None:
    fast = intarsia.compile(Net(), (X,), engines=[Faulty(fault="build"), "openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)
    torch.testing.assert_close(fast(X), Net()(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("later run", "RuntimeError: it fell over in later run"),
        ("dtype", "result 0 is torch.float64"),
        ("shape", r"result 0 is torch.float32 \(20,\)"),
        ("count", "it gives 2 results where PyTorch gives 1"),
    ],
)
def test_a_failure_at_a_call_is_answered_by_pytorch_once_told_and_for_good(fault: str, reason: str) -> None:
    engine = Faulty(fault=fault)
    fast = compiled(engine)
    assert fast.plan.engines == ("faulty",)
    torch.testing.assert_close(fast(X), Net()(X))
    engine.broken.set()
    with pytest.warns(UserWarning, match=f"faulty failed at a call .*{reason}") as told:
        torch.testing.assert_close(fast(X), Net()(X))
    assert told[0].filename == __file__, "the line of the call"
    engine.broken.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(X), Net()(X))
    assert any("faulty failed at a call" in note for note in fast.notes)
    (step,) = fast.inlay.steps
    assert step.program.failure is not None, "for good"


@pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "mnn"])
def test_an_input_without_plain_memory_is_no_failure_of_the_engine(engine: str) -> None:
    """Engines take no sparse tensor, and MNN no lazy negative: PyTorch answers only these calls."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.linspace(-1, 1, 32).reshape(4, 8)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    for call in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.warns(
            UserWarning, match=f"PyTorch runs this call in place of {engine}, which cannot read"
        ):
            torch.testing.assert_close(fast(call), model(x).detach())
    for call in (negative, x):
        torch.testing.assert_close(fast(call), model(x).detach())
    assert fast.plan.engines == (engine,)
    assert not any("failed at a call" in note for note in fast.notes)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.table(ids))


def test_an_error_of_eager_is_the_callers_and_no_failure_of_the_engine() -> None:
    model, ids = Lookup().eval(), torch.tensor([0, 3])
    fast = intarsia.compile(model, (ids,), engines=["onnxruntime"], min_block_size=1)
    with pytest.raises(IndexError):
        fast(torch.tensor([0, 9]))
    torch.testing.assert_close(fast(ids), model(ids).detach())
    assert not any("failed at a call" in note for note in fast.notes)


@pytest.mark.parametrize("fault", ["hang", "hang in probe", "hang in run"])
def test_an_engine_that_hangs_is_left_behind(fault: str) -> None:
    engine = Faulty(fault=fault)
    try:
        fast = compiled(engine, build_limit_s=0.3)
        torch.testing.assert_close(fast(X), Net()(X))
        assert "did not end within 0.3 s" in str(fast.plan)
        assert fast.plan.engines == ("pytorch",)
    finally:
        engine.released.set()


class Forgetful(OnnxRuntime):
    """ONNX Runtime whose programs with a Tanh in them answer rightly once, when they are tried."""

    name = "forgetful"

    def build(self, net: Network) -> Program:
        program, calls = super().build(net), []
        wrong = "Tanh" in [layer.kind for layer in net.get_layers()]

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            calls.append(1)
            return tuple(t + (wrong and len(calls) > 1) for t in program(*tensors))

        return run


class Halves(nn.Module):
    """Two segments with an operator between that no engine has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(torch.special.i0(torch.tanh(x * 2) + 1)) - 0.5


def test_a_fault_that_only_the_whole_shows_costs_one_engine() -> None:
    others = [f"aten.{name}.Tensor" for name in ("mul", "add", "sub")]
    support = {"forgetful": ["aten.tanh.default"], "onnxruntime": [*others, "aten.erf.default"]}
    engines = [Forgetful(), "onnxruntime"]
    options = {"engines": engines, "min_block_size": 1, "backend_support_map": support}
    fast = intarsia.compile(Halves(), (X,), **options)
    torch.testing.assert_close(fast(X), Halves()(X))
    assert "onnxruntime" in fast.plan.engines and "forgetful" not in fast.plan.engines
    assert any("forgetful is not used: with forgetful, the compiled model" in n for n in fast.notes)


def test_a_fault_that_only_the_whole_shows_costs_one_segment() -> None:
    fast = intarsia.compile(Halves(), (X,), engines=[Forgetful()], min_block_size=1)
    torch.testing.assert_close(fast(X), Halves()(X))
    assert fast.plan.engines[-1] == "forgetful" and fast.plan.engines[0] == "pytorch"
    assert any("a segment is moved" in note for note in fast.notes)


def test_an_engine_that_cannot_tell_whether_it_is_there() -> None:
    with pytest.raises(EngineError, match="RuntimeError: it fell over in unavailable"):
        compiled(Faulty(fault="unavailable"))


def test_an_engine_of_another_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("shattered", "no_such_package:Engine", "intarsia.engines")
    monkeypatch.setattr(intarsia.engines, "_entry_points", lambda path: (entry,))
    fast = intarsia.compile(Net(), (X,))
    torch.testing.assert_close(fast(X), Net()(X), rtol=1e-5, atol=1e-6)
    assert any("shattered: no_such_package:Engine could not be loaded" in note for note in fast.notes)
    with pytest.raises(EngineError, match="'shattered' cannot be used"):
        intarsia.compile(Net(), (X,), engines=["shattered"])


@pytest.mark.parametrize("fault", ["probe", "build", "first run"])
def test_interrupting_leaves_nothing_broken(fault: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.BatchNorm1d(5)).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        intarsia.compile(
            model, (X,), engines=[Faulty(fault=fault, error=KeyboardInterrupt)], min_block_size=1
        )
    _untouched(model, before, state)


@pytest.mark.parametrize(
    "phase", ["job.lower_model", "job.support_table", "job.whole_fault", "assembler.Compiled", "job.Judge"]
)
def test_interrupting_any_phase(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), nn.BatchNorm1d(5)).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"intarsia.compiler.{phase}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            intarsia.compile(model, (X,))
    _untouched(model, before, state)


def _untouched(model: nn.Module, before: dict[str, torch.Tensor], state: torch.Tensor) -> None:
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    fast = intarsia.compile(model, (X,), min_block_size=1)  # nothing is locked or half registered
    torch.testing.assert_close(fast(X), model.eval()(X).detach(), rtol=1e-5, atol=1e-6)


def test_a_users_converter_that_fails_is_told() -> None:
    from intarsia.convert import ConverterPriority, converter, registry

    @converter(torch.ops.aten.erf.default, priority=ConverterPriority.HIGH, register=False)
    def mine(ctx: Any, self: Any) -> Any:
        raise ZeroDivisionError("an author's mistake")

    with registry.override(mine):
        fast = compiled("onnxruntime")
    assert fast.plan.engines == ("onnxruntime",)
    (note,) = [note for note in fast.notes if "mine" in note]
    assert "ZeroDivisionError: an author's mistake" in note and "the converter unary takes it" in note
