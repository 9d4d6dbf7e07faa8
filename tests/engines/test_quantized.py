"""Models that were quantised beforehand: exact by default, integer kernels within a tolerance."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.convert import drivers
from tests.convert.programs import program_of
from torch import nn

import intarsia
from intarsia.cache.machine import is_arm
from intarsia.choose.mixes import shortened
from intarsia.convert import convert
from intarsia.convert.aten.quantize import HAS_QUANTIZED
from intarsia.engines import OnnxRuntimeInt8, OpenVINOInt8, PyTorch
from intarsia.engines.openvino.program import CompiledModel
from intarsia.network import Network

pytestmark = pytest.mark.skipif(not HAS_QUANTIZED, reason="this torch has no quantized_decomposed operators")
ENGINES = [engine for engine in (OpenVINOInt8(), OnnxRuntimeInt8()) if engine.unavailable() is None]
BY_ENGINE = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Quantized(nn.Module):
    """What pt2e makes of a convolution and a product: integers for weights, rounding between."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        for name, shape in (("conv", (8, 3, 3, 3)), ("linear", (4, 8 * 16 * 16))):
            weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=random)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", torch.rand(shape[0], generator=random) / 500 + 1e-3)
            self.register_buffer(f"{name}_zero", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(8, generator=random))

    def weight(self, name: str) -> torch.Tensor:
        scale, zero = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
        q = torch.ops.quantized_decomposed
        return q.dequantize_per_channel(getattr(self, name), scale, zero, 0, -127, 127, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _rounded(x, 0.03, 128)
        x = torch.relu(nn.functional.conv2d(x, self.weight("conv"), self.bias, padding=1))
        x = _rounded(x, 0.02, 0)
        return nn.functional.linear(x.flatten(1), self.weight("linear"))


def _rounded(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    q = torch.ops.quantized_decomposed
    integers = q.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)
    return q.dequantize_per_tensor(integers, scale, zero, 0, 255, torch.uint8)


def _kinds(net: Network) -> list[str]:
    return [layer.kind for layer in net.get_layers()]


def _net(function: Any, *inputs: torch.Tensor, engine: Any = None) -> Network:
    return convert(program_of(function, *inputs), engine=engine)


def _integer_net(function: Any, *inputs: torch.Tensor) -> Network:
    return _net(function, *inputs, engine=OnnxRuntimeInt8())


def test_rounding_is_a_layer_for_engines_that_compute_in_integers() -> None:
    assert "QuantizeLinear" not in _kinds(_net(lambda x: _rounded(x, 0.03, 128), X))
    made = _integer_net(lambda x: _rounded(x, 0.03, 128), X)
    assert _kinds(made) == ["QuantizeLinear", "DequantizeLinear"]
    made.verify()
    first, second = (layer.get_inputs(1)[0] for layer in made.get_layers())
    assert first is not None and second is not None and first.value is second.value  # one scale for both


def test_a_range_that_no_layer_has_stays_spelled_out() -> None:
    q = torch.ops.quantized_decomposed
    net = _integer_net(lambda x: q.quantize_per_tensor(x, 0.03, 0, -127, 127, torch.int8), X)
    assert "QuantizeLinear" not in _kinds(net) and not net.is_quantized()


def test_integers_may_be_read_by_another_scale() -> None:
    q = torch.ops.quantized_decomposed

    def function(x: torch.Tensor) -> torch.Tensor:
        integers = q.quantize_per_tensor(x, 0.03, 0, -128, 127, torch.int8)
        return q.dequantize_per_tensor(integers, 0.06, 0, -128, 127, torch.int8)

    net = _integer_net(function, X)
    assert _kinds(net) == ["QuantizeLinear", "DequantizeLinear"]
    (found,) = drivers.build("onnxruntime", net)(X)
    assert (found - function(X)).abs().max() <= 0.0601


@pytest.mark.parametrize(("scale", "zero"), [(0.0, 0), (-0.03, 0), (0.03, 200)])
def test_what_no_layer_says_stays_spelled_out(scale: float, zero: int) -> None:
    q = torch.ops.quantized_decomposed
    net = _integer_net(lambda x: q.quantize_per_tensor.default(x, scale, zero, -128, 127, torch.int8), X)
    assert "QuantizeLinear" not in _kinds(net)


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(1e-3, 10.0),
    zero=st.integers(-128, 127),
    values=st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20),
)
def test_integers_are_off_by_one_at_most(scale: float, zero: int, values: list[float]) -> None:
    q, x = torch.ops.quantized_decomposed, torch.tensor(values)
    net = _integer_net(lambda x: q.quantize_per_tensor(x, scale, zero, -128, 127, torch.int8), x)
    assert "QuantizeLinear" in _kinds(net)
    (found,) = drivers.build("onnxruntime", net)(x)
    expected = q.quantize_per_tensor(x, scale, zero, -128, 127, torch.int8)
    assert (found.int() - expected.int()).abs().max() <= 1


@BY_ENGINE
def test_integer_kernels_are_near_the_quantised_model(engine: Any) -> None:
    model = Quantized().eval()
    fast = intarsia.compile(model, (X,), engines=[engine], tolerance=0.05)
    assert engine.name in fast.plan.engines
    expected = model(X)
    assert (fast(X) - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.skipif(OpenVINOInt8() not in ENGINES, reason=str(OpenVINOInt8().unavailable()))
def test_openvino_computes_in_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[str] = []
    made = CompiledModel.__init__

    def noted(self: CompiledModel, ports: Any, compiled: Any, *rest: Any) -> None:
        for op in compiled.get_runtime_model().get_ordered_ops():
            about = op.get_rt_info()
            if about["layerType"].astype(str) in ("Convolution", "FullyConnected"):
                kernels.append(about["primitiveType"].astype(str))
        made(self, ports, compiled, *rest)

    monkeypatch.setattr(CompiledModel, "__init__", noted)
    OpenVINOInt8().build(_net(Quantized().eval(), X, engine=OpenVINOInt8()))
    integers, kernels[:] = list(kernels), []
    intarsia.OpenVINO().build(_net(Quantized().eval(), X, engine=intarsia.OpenVINO()))
    # On ARM OpenVINO has one for the product, and none for the convolution.
    of_integers = [kernel for kernel in integers if kernel.endswith("I8")]
    assert len(integers) == 2 and len(of_integers) == (1 if is_arm() else 2)
    assert len(kernels) == 2 and all(kernel.endswith("f32") for kernel in kernels)


@BY_ENGINE
def test_what_has_no_integer_is_left_to_pytorch(engine: Any) -> None:
    model = Quantized().eval()
    fast = intarsia.compile(model, (X,), engines=[engine], tolerance=0.05)
    wild = X.clone()
    wild[0, 0, 0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fast(wild)
    torch.testing.assert_close(found, model(wild))
    # On x86 without VNNI OpenVINO's products saturate, and PyTorch keeps those it answers wrongly.
    if fast.plan.engines == (engine.name,):
        assert any("PyTorch runs this call" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_exact_by_default(engine: str) -> None:
    model = Quantized().eval()
    fast = intarsia.compile(model, (X,), engines=[engine])
    assert set(fast.plan.engines) == {engine}
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-4)


def test_tried_only_where_there_are_integers() -> None:
    engines = [OpenVINOInt8(), OnnxRuntimeInt8(), PyTorch()]
    plain, integers = program_of(torch.relu, X), program_of(Quantized().eval(), X)
    assert [c.name for c in shortened(plain, engines)] == ["onnxruntime-int8"]
    assert [c.name for c in shortened(integers, engines)] == ["openvino-int8", "onnxruntime-int8"]
