"""Engines: equal answers for every dtype, weights shared by address, float32, and those of other packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import NetworkEngine, OnnxRuntime, OpenVINO, known_engines
from intarsia.errors import EngineError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

ENGINES = [OnnxRuntime(), OpenVINO()]
by_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]


def linear(weight: torch.Tensor, rows: int | str = 2) -> Network:
    net = Network()
    with net_guard(net):
        x = Tensor("x", weight.dtype, (rows, weight.shape[0]))
        F.relu(F.matmul(x, F.constant(weight))).mark_output("y")
    return net


@by_engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_cross(engine: NetworkEngine, dtype: torch.dtype) -> None:
    net = Network()
    with net_guard(net):
        F.reshape(Tensor("x", dtype, (2, 3)), [3, 2]).mark_output("y")
    assert engine.probe(net) is None
    x = torch.randint(0, 2, (2, 3)).to(dtype)
    (y,) = engine.build(net)(x)
    assert y.dtype == dtype and torch.equal(y, x.reshape(3, 2))


@by_engine
def test_sizes_known_only_at_the_call(engine: NetworkEngine) -> None:
    weight = torch.randn(4, 4)
    program = engine.build(linear(weight, "n"))
    for rows in (1, 3, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(program(x)[0], torch.relu(x @ weight), rtol=1e-5, atol=1e-5)


@by_engine
def test_an_input_may_ask_for_gradients(engine: NetworkEngine) -> None:
    weight, x = torch.randn(4, 4), torch.randn(2, 4, requires_grad=True)
    (y,) = engine.build(linear(weight))(x)
    torch.testing.assert_close(y, torch.relu(x @ weight).detach(), rtol=1e-5, atol=1e-5)


@by_engine
def test_float32_means_float32(engine: NetworkEngine) -> None:
    # In half precision the small term would vanish: 4096 + 0.5 rounds to 4096.
    weight = torch.full((512, 4), 8.0)
    weight[0] = 0.5
    x = torch.ones(2, 512)
    (y,) = engine.build(linear(weight))(x)
    torch.testing.assert_close(y, torch.relu(x.double() @ weight.double()).float(), rtol=0, atol=0)


@by_engine
def test_weights_are_read_where_they_lie(engine: NetworkEngine) -> None:
    # The table of an embedding is neither packed nor folded: a change to it shows, so nobody copied it.
    table = torch.randn(100, 64)
    net = Network()
    with net_guard(net):
        ids = Tensor("ids", torch.int64, (3,))
        F.gather(F.constant(table), ids).mark_output("y")
    program = engine.build(net)
    ids_ = torch.tensor([0, 5, 99])
    torch.testing.assert_close(program(ids_)[0], table[ids_])
    table[5] = 7.0
    torch.testing.assert_close(program(ids_)[0], table[ids_])


@by_engine
def test_refusal_is_a_sentence(engine: NetworkEngine) -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
        F.opaque("nobody.knows", "Mystery", x, makes=[(torch.float32, (2, 3))])[0].mark_output("y")
    reason = engine.probe(net)
    assert reason is not None and "\n" not in reason and len(reason) > 20
    with pytest.raises(EngineError, match="failed to build"):
        engine.build(net)


@by_engine
def test_empty_tensors(engine: NetworkEngine) -> None:
    net = Network()
    with net_guard(net):
        F.relu(Tensor("x", torch.float32, (0, 3))).mark_output("y")
    (y,) = engine.build(net)(torch.empty(0, 3))
    assert y.shape == (0, 3)


@pytest.mark.full
@by_engine
def test_more_than_two_gigabytes_of_weights(engine: NetworkEngine) -> None:
    net, weights = Network(), [torch.randn(16384, 16384) * 0.01 for _ in range(3)]
    with net_guard(net):
        x = Tensor("x", torch.float32, (1, 16384))
        for weight in weights:
            x = F.matmul(x, F.constant(weight))
        x.mark_output("y")
    x0 = torch.randn(1, 16384)
    expected = x0
    for weight in weights:
        expected = expected @ weight
    (y,) = engine.build(net)(x0)
    assert float((y - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_is_not_given_to_a_cpu_engine() -> None:
    import intarsia

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).cuda().eval()
    x = torch.randn(2, 8, device="cuda")
    fast = intarsia.compile(model, (x,), min_block_size=1)
    torch.testing.assert_close(fast(x), model(x).detach())
    assert fast.plan.engines == ("pytorch",)
    assert "it runs on cuda" in str(fast.plan) or not fast.plan.segments[0].reasons


@pytest.mark.parametrize(
    ("engine", "spins", "stops"),
    [
        (OnnxRuntime(), "1", "1"),
        (OnnxRuntime(spinning=False), "0", "1"),
        (OnnxRuntime(options={"session.force_spinning_stop": "0"}), "1", "0"),
    ],
)
def test_threads_spin_within_a_run(
    engine: OnnxRuntime,
    spins: str,
    stops: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = []
    original = OnnxRuntime._session

    def session(self: OnnxRuntime, *args: Any, **named: Any) -> Any:
        made.append(original(self, *args, **named))
        return made[-1]

    monkeypatch.setattr(OnnxRuntime, "_session", session)
    engine.build(linear(torch.randn(4, 4)))
    options = made[-1].get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == spins
    assert options.get_session_config_entry("session.force_spinning_stop") == stops
    assert "already exists" not in capfd.readouterr().err


# An engine that another package brings: found by its entry point, compiled with, told of in the plan.


# The outside engine is real: it runs ONNX's own reference implementation.
CODE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from onnx.reference import ReferenceEvaluator

from intarsia.engines import NetworkEngine
from intarsia.network.serialize import to_proto

CALLS = []


@dataclass(frozen=True)
class Outside(NetworkEngine):
    name: ClassVar[str] = "outside"

    def unavailable(self):
        return None

    def probe(self, net):
        kinds = [layer.kind for layer in net.get_layers()]
        return "outside knows no Tanh" if "Tanh" in kinds else None

    def build(self, net):
        model, _ = to_proto(net, weights_outside=False)
        run, names = ReferenceEvaluator(model).run, [tensor.name for tensor in net.get_inputs()]

        def program(*inputs):
            CALLS.append(len(inputs))
            feed = dict(zip(names, (x.numpy(force=True) for x in inputs), strict=True))
            return tuple(torch.from_numpy(made) for made in run(None, feed))

        return program
"""


def install(folder: Path) -> None:
    """`outside_engine`, as pip would leave it: a module and a dist-info directory."""
    (folder / "outside_engine.py").write_text(CODE)
    info = folder / "outside_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[intarsia.engines]\noutside = outside_engine:Outside\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("outside_engine", None)


@pytest.fixture
def package(folder: Path) -> None:
    install(folder)


@pytest.mark.usefixtures("package")
def test_an_outside_package_brings_an_engine() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    assert list(known_engines())[-1] == "pytorch" and "outside" in known_engines()
    compiled = intarsia.compile(model, (x,), engines=["outside"], min_block_size=1)
    assert [segment.engine for segment in compiled.plan.segments] == ["outside", "pytorch", "outside"]
    assert "outside knows no Tanh" in str(compiled.plan)
    calls = sys.modules["outside_engine"].CALLS
    before = len(calls)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(calls) == before + 2, "both segments ran on the outside engine"


def test_a_package_installed_while_the_process_runs_is_found(folder: Path) -> None:
    with pytest.raises(EngineError, match="there is no engine 'outside'"):
        intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"])
    install(folder)
    fast = intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"], min_block_size=1)
    assert fast.plan.engines == ("outside",)


def test_without_the_package_its_engine_is_unknown() -> None:
    with pytest.raises(EngineError, match="there is no engine 'outside'"):
        intarsia.compile(nn.ReLU(), (torch.randn(2),), engines=["outside"])
