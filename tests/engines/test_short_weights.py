"""Weights of 8 and 4 bits: the engines' own kernels run them, and everything else stays as it was."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import intarsia
from intarsia.cache.machine import is_arm
from intarsia.compare import relative_error
from intarsia.engines import (
    Engine,
    OnnxRuntimeInt4Weights,
    OnnxRuntimeInt8,
    OnnxRuntimeInt8Weights,
    OpenVINOInt4Weights,
    OpenVINOInt8Weights,
)
from intarsia.engines.onnxruntime.nbits import silent_tool
from intarsia.engines.openvino import short
from intarsia.engines.openvino.program import CompiledModel
from intarsia.errors import EngineError

ENGINES = [OnnxRuntimeInt8Weights(), OnnxRuntimeInt4Weights(), OpenVINOInt8Weights(), OpenVINOInt4Weights()]
ERROR = {8: 0.03, 4: 0.3}
IDS = torch.arange(32).reshape(2, 16)


class Net(nn.Module):
    """Products with and without something added, a weight that is read twice, and one that varies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=place % 2 == 0) for place in range(3))
        self.matrix = nn.Parameter(torch.randn(64, 48) / 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = torch.softmax(x @ x.transpose(1, 2), -1) @ x  # of no constant weight
        return torch.cat([x @ self.matrix, nn.functional.linear(x, self.table.weight)], -1)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE_GB", "0")


def _compiled(engine: Engine) -> tuple[nn.Module, Any]:
    model = Net().eval().requires_grad_(False)
    return model, intarsia.compile(model, (IDS,), engines=[engine], min_block_size=1)


@pytest.mark.parametrize("engine", ENGINES[:2], ids=lambda engine: engine.name)
def test_products_of_onnxruntime(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original, path = onnxruntime.InferenceSession, tmp_path / "optimized.onnx"

    def session(data: bytes, options: Any, **more: Any) -> Any:
        options.optimized_model_filepath = str(path)
        return original(data, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    model, fast = _compiled(engine)
    assert fast.plan.engines == (engine.name,)
    graph = onnx.load(path).graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 5
    for node in products:
        told = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        assert (told["bits"], told["block_size"], told["accuracy_level"]) == (engine.bits, engine.block, 4)
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    floats = [array.size for array in held.values() if array.dtype == np.float32 and array.ndim == 2]
    assert max(floats, default=0) <= 50 * 64  # the table, which is looked up too; no other matrix
    assert 1e-6 < relative_error(fast(IDS), model(IDS)) < ERROR[engine.bits]


@pytest.mark.parametrize("engine", ENGINES[2:], ids=lambda engine: engine.name)
def test_products_of_openvino(
    engine: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    original = CompiledModel.__init__

    def init(self: CompiledModel, ports: Any, compiled: Any, *more: Any) -> None:
        made.append(compiled)
        original(self, ports, compiled, *more)

    monkeypatch.setattr(CompiledModel, "__init__", init)
    level = logging.getLogger("nncf").level
    model, fast = _compiled(engine)
    assert fast.plan.engines == (engine.name,)
    told = [op.get_rt_info() for op in made[-1].get_runtime_model().get_ops()]
    kinds = [
        t["runtimePrecision"].astype(str) for t in told if t["layerType"].astype(str) == "FullyConnected"
    ]
    # OpenVINO has no kernels for short weights on ARM: it makes float32 of them.
    short = {"f32"} if is_arm() else {"u8", f"u{engine.bits}"}
    assert len(kinds) == 5 and set(kinds) <= short and (is_arm() or f"u{engine.bits}" in kinds)
    assert 1e-6 < relative_error(fast(IDS), model(IDS)) < ERROR[engine.bits]
    assert capfd.readouterr().out == "" and logging.getLogger("nncf").level in (level, logging.INFO)


@pytest.mark.parametrize("engine", ENGINES[:2], ids=lambda engine: engine.name)
@pytest.mark.parametrize("sizes", [(33, 17), (1, 300), (300, 1), (129, 31)], ids=str)
def test_sizes_that_fill_no_block(engine: Any, sizes: tuple[int, int]) -> None:
    torch.manual_seed(1)
    model = nn.Linear(*sizes).eval().requires_grad_(False)
    x = torch.randn(3, 5, sizes[0])
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert fast.plan.engines == (engine.name,)
    assert relative_error(fast(x), model(x)) < ERROR[engine.bits]


@pytest.mark.parametrize("engine", [*ENGINES, OnnxRuntimeInt8()], ids=lambda engine: engine.name)
def test_what_is_not_finite_is_left_to_pytorch(engine: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32)).eval().requires_grad_(False)
    x = torch.randn(4, 64)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    for bad in (float("nan"), float("inf"), -float("inf")):
        given = x.clone()
        given[1, 5] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that PyTorch runs this call, told once
            made = fast(given)
        torch.testing.assert_close(made, model(given), equal_nan=True)
    assert relative_error(fast(x), model(x)) > 1e-6  # the engine runs again


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_they_are_saved_and_loaded(engine: Engine, tmp_path: Path) -> None:
    _, fast = _compiled(engine)
    intarsia.save(fast, tmp_path / "short.intarsia")
    again = intarsia.load(tmp_path / "short.intarsia")
    assert again.plan.engines == (engine.name,) and torch.equal(again(IDS), fast(IDS))


def test_the_tools_leave_logging_as_it_was() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    with silent_tool():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert (root.level, root.handlers) == before


@pytest.mark.openvino
def test_without_nncf_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"nncf is not installed; pip install 'intarsia\[nncf\]'"):
        _compiled(OpenVINOInt8Weights())


def test_what_others_print_is_printed() -> None:
    out = io.StringIO()
    mine = short._Filtered(out, {threading.get_ident()})
    other = short._Filtered(out, set())
    assert mine.write("heard") == other.write("other") == 5 and out.getvalue() == "heard"
