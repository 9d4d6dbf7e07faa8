"""Models whose activations are rounded to 8 bits: integers multiply integers, and answer as the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.convert.aten.quantize import HAS_QUANTIZED
from intarsia.engines.onnxruntime import nbits
from intarsia.lower import Lowered, lower
from intarsia.quantized import INTEGER_LINEAR, multiplies_integers_exactly

ENGINES = ["onnxruntime", "openvino", "pytorch"]
BY_ENGINE = pytest.mark.parametrize("engine", ENGINES)
torchao = pytest.importorskip("torchao.quantization")
X = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(3))


def _dynamic(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).eval()
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig(**options))
    return model


def _lowered(model: nn.Module, *args: torch.Tensor) -> Lowered:
    return lower(capture(model, args, {}), has_converter=registry.__contains__)


def _products(model: nn.Module, *args: torch.Tensor) -> int:
    return sum(node.target is INTEGER_LINEAR for node in _lowered(model, *args).module.graph.nodes)


LAYOUTS: dict[str, dict[str, Any]] = {
    "by row": {},
    "asymmetric": {"act_mapping_type": torchao.MappingType.ASYMMETRIC},
    "by tensor": {"granularity": torchao.PerTensor()},
    "half the range": {"reduce_range": True},
}


@BY_ENGINE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_activations_of_torchao(layout: str, engine: str) -> None:
    model = _dynamic(**LAYOUTS[layout])
    assert _products(model, X) == 2
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    assert f"activations and weights in 8 bits on {engine}: 2 products" in str(fast.plan)
    as_floats = "openvino multiplies activations of 8 bits as float32: it has no exact product of integers"
    assert (as_floats in fast.notes) == (engine == "openvino")
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=2e-5, atol=2e-5)


def test_onnxruntime_multiplies_every_integer_exactly() -> None:
    """Sums of the largest products, of one row and of many: kernels without VNNI saturate."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 256, bias=False).eval()
    layer.weight = nn.Parameter(torch.randint(0, 2, layer.weight.shape) * 254.0 - 127)
    torchao.quantize_(layer, torchao.Int8DynamicActivationInt8WeightConfig())
    for rows in (1, 3, 64):
        x = (torch.randint(0, 2, (rows, 512)) * 2 - 1) * torch.rand(rows, 1)
        fast = intarsia.compile(layer, (x,), engines=["onnxruntime"], min_block_size=1)
        torch.testing.assert_close(fast(x), layer(x).detach(), rtol=1e-6, atol=1e-6)


def test_weights_are_unsigned_where_kernels_saturate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on x86 without VNNI, which adds pairs of products in 16 bits unless the weight is uint8."""
    monkeypatch.setattr(nbits, "saturates", lambda: True)
    model, x = _dynamic(), torch.randn(7, 128)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    assert "activations and weights in 8 bits on onnxruntime: 2 products" in str(fast.plan)
    intarsia.save(fast, tmp_path / "model.intarsia")
    for compiled in (fast, intarsia.load(tmp_path / "model.intarsia")):
        torch.testing.assert_close(compiled(x), model(x).detach(), rtol=2e-5, atol=2e-5)


def test_pytorch_tells_whether_its_own_products_are_exact() -> None:
    x = torch.full((1, 64), 127, dtype=torch.int8)
    assert multiplies_integers_exactly() == (int(torch._int_mm(x, x.t())) == 64 * 127 * 127)


@BY_ENGINE
def test_lengths_that_vary(engine: str) -> None:
    model, length = _dynamic(), torch.export.Dim("length", min=1, max=64)
    fast = intarsia.compile(model, (X,), dynamic_shapes=({1: length},), engines=[engine], min_block_size=1)
    for size in (1, 4, 64):
        x = torch.randn(2, size, 128)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)


@BY_ENGINE
def test_nan_infinities_zeros_and_rows_of_other_sizes(engine: str) -> None:
    model = _dynamic()
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    x = X.clone()
    x[0, 1], x[0, 2], x[1, 0] = 0, 1e30 * x[0, 2], 1e-30 * x[1, 0]
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)
    x[0, 0, 5], x[1, 1, 7], x[1, 2, 3] = torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, x = _dynamic().to(dtype), X.to(dtype)
    assert _products(model, x) == 2
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=4 * rounding, atol=4 * rounding)


@BY_ENGINE
def test_a_file_and_new_weights(engine: str, tmp_path: Path) -> None:
    model = _dynamic()
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    intarsia.save(fast, tmp_path / "model.intarsia")
    again = intarsia.load(tmp_path / "model.intarsia")
    assert f"activations and weights in 8 bits on {engine}: 2 products" in str(again.plan)
    torch.testing.assert_close(again(X), model(X).detach(), rtol=2e-5, atol=2e-5)
    other = _dynamic(reduce_range=True)
    fast.refit(_dynamic())
    with torch.no_grad():
        other[0].bias.add_(1)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=2e-5, atol=2e-5)


def test_mnn_refuses_with_a_sentence() -> None:
    pytest.importorskip("MNN")
    model = _dynamic()
    fast = intarsia.compile(model, (X,), engines=["mnn"], min_block_size=1)
    assert "intarsia.integer_linear.default x2: " in str(fast.plan)
    assert "mnn does not divide exactly" in str(fast.plan)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_inductor_multiplies_integers() -> None:
    """Its patterns took the scale of the weight, which came first, for that of the activations: NaN."""
    model, x = _dynamic(), torch.randn(40, 128)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "activations and weights in 8 bits on inductor: 2 products" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)


class _Rounded(nn.Module):
    """Activations as compressed-tensors rounds them: by a scale of each row, or by a constant."""

    def __init__(self, static: bool) -> None:
        super().__init__()
        self.static = static
        self.register_buffer("weight", torch.randint(-128, 128, (48, 128), dtype=torch.int8))
        self.register_buffer("weight_scale", torch.rand(48, 1) / 128)
        self.register_buffer("input_scale", torch.tensor([0.03]))
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.input_scale if self.static else x.abs().amax(-1, keepdim=True) / 127.5
        x = (x / scale).clamp(-128.0, 127.0).round() * scale
        return nn.functional.linear(x, self.weight.float() * self.weight_scale, self.bias)


@BY_ENGINE
@pytest.mark.parametrize("static", [False, True])
def test_numbers_that_stand_for_integers(static: bool, engine: str) -> None:
    torch.manual_seed(0)
    model = _Rounded(static).eval()
    assert _products(model, X) == 1
    fast = intarsia.compile(model, (X,), engines=[engine], min_block_size=1)
    assert f"activations and weights in 8 bits on {engine}: 1 product" in str(fast.plan)
    x = X.clone()
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)
    x[0, 0, 5], x[1, 1, 7] = torch.nan, torch.inf
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5, equal_nan=True)


class _Pt2e(nn.Module):
    """What pt2e makes of a convolution and two products."""

    def __init__(self, dtype: torch.dtype, zero: int) -> None:
        super().__init__()
        self.dtype, self.zero = dtype, zero
        for name, shape in (("conv", (4, 2, 3)), ("first", (64, 4 * 16)), ("second", (32, 64))):
            self.register_buffer(name, torch.randint(-127, 128, shape, dtype=torch.int8))
            self.register_buffer(f"{name}_scale", torch.rand(shape[0]) / 500 + 1e-3)
            self.register_buffer(f"{name}_zero", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(64))

    def weight(self, name: str) -> torch.Tensor:
        scale, zero = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero")
        q = torch.ops.quantized_decomposed
        return q.dequantize_per_channel(getattr(self, name), scale, zero, 0, -127, 127, torch.int8)

    def rounded(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        q, ends = torch.ops.quantized_decomposed, torch.iinfo(self.dtype)
        settings = (scale, self.zero, ends.min, ends.max, self.dtype)
        return q.dequantize_per_tensor(q.quantize_per_tensor(x, *settings), *settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.conv1d(self.rounded(x, 0.03), self.weight("conv"), padding=1)
        x = nn.functional.linear(self.rounded(x, 0.05).flatten(1), self.weight("first"), self.bias)
        return nn.functional.linear(self.rounded(x.relu(), 0.04), self.weight("second"))


@pytest.mark.skipif(not HAS_QUANTIZED, reason="this torch has no quantized_decomposed operators")
@BY_ENGINE
@pytest.mark.parametrize(("dtype", "zero"), [(torch.uint8, 128), (torch.uint8, 100), (torch.int8, -7)])
def test_static_activations_of_pt2e(dtype: torch.dtype, zero: int, engine: str) -> None:
    torch.manual_seed(0)
    model, x = _Pt2e(dtype, zero).eval(), torch.randn(3, 2, 16)
    assert _products(model, x) == 2
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert fast.plan.engines == (engine,)
    assert f"activations and weights in 8 bits on {engine}: 2 products" in str(fast.plan)
    said = "these products of rounded activations are computed in floats: conv1d: convolutions have no exact"
    assert any(note.startswith(said) for note in fast.notes)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)
    x[0, 0, 3], x[1, 1, 5] = torch.nan, torch.inf
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5, equal_nan=True)


def test_static_activations_of_torchao() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96), nn.GELU()).eval()
    scale = torch.full((1, 1), 0.03)
    torchao.quantize_(
        model,
        torchao.Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=torchao.PerTensor()),
    )
    x = X.flatten(0, 1)
    assert _products(model, x) == 1
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)


def test_products_that_stay_floats_are_named() -> None:
    torch.manual_seed(0)
    model = _Rounded(static=False).eval()
    model.weight_scale = torch.rand(48, 1).expand(48, 128).contiguous()
    model.weight_scale[:, 64:] *= 2
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    assert any("linear: their weights have 8 bits in 2 groups" in note for note in fast.notes)
    torch.testing.assert_close(fast(X), model(X).detach(), rtol=2e-5, atol=2e-4)


def test_of_one_column_the_product_stays_as_it_is() -> None:
    """`torch._int_mm` makes any numbers of it (torch 2.13)."""
    model = _Rounded(static=True).eval()
    model.weight = torch.randint(-128, 128, (48, 1), dtype=torch.int8)
    x = torch.randn(6, 1)
    assert _products(model, x) == 0
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=2e-5, atol=2e-5)


class _Sums(nn.Module):
    """Whole sums of products, without scales."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (32, 64), dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight.t()).float() + 0.5


def test_integers_from_outside() -> None:
    model, x = _Sums().eval(), torch.randint(-128, 128, (5, 64), dtype=torch.int8)
    assert _products(model, x) == 1
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    assert fast.plan.engines == ("onnxruntime",)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
