"""Products and sums of bfloat16 run in OpenVINO's own kernels for it, and nothing else is made shorter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines.openvino import engine as openvino_engine
from intarsia.engines.openvino.core import capabilities

F = nn.functional
pytest.importorskip("openvino")
has_bf16 = pytest.mark.skipif("BF16" not in capabilities(), reason="the processor has no bfloat16")


class Gated(nn.Module):
    """Three products of one moved value, a gate, a residual, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.patch = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(F.silu(self.gate(x)) * self.up(x))
        image = F.relu(self.patch(y.reshape(1, 4, 4, 64)))
        return F.scaled_dot_product_attention(y, y, y) + image.mean(1).reshape(1, 4, 64).repeat(1, 4, 1)


class InFloat32(nn.Module):
    """A bfloat16 model that computes in float32 for its own sake: angles of far positions, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wide = self.inner(x).float()
        angles = positions.float()[:, None] * torch.arange(1, 65)
        return (wide @ self.inner.weight.float()) * angles.cos()


def _models(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: torch.Tensor) -> list[Counter[str]]:
    """What is compiled, and equal to eager: layers that read float numbers, by kind and dtype."""
    seen: list[Counter[str]] = []
    before = openvino_engine.settings

    def watched(built: Any) -> dict[str, str]:
        seen.append(
            Counter(
                f"{layer.get_type_name()} {layer.get_input_element_type(0).get_type_name()}"
                for layer in built.get_ordered_ops()
                if layer.get_input_size()
            )
        )
        return before(built)

    monkeypatch.setattr(openvino_engine, "settings", watched)
    fast = intarsia.compile(model, args, engines=["openvino"])
    assert fast.plan.engines == ("openvino",)
    with torch.no_grad():
        found, expected = fast(*args), model(*args)
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()
    return seen


@has_bf16
def test_products_and_sums_of_bfloat16_are_computed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    (seen, *_) = _models(monkeypatch, Gated().eval().bfloat16(), torch.randn(1, 16, 64).bfloat16())
    assert seen["MatMul bf16"] == 3
    assert seen["Convolution bf16"] == 1
    assert not seen["MatMul f32"] and not seen["Convolution f32"]


@has_bf16
def test_what_is_computed_in_float32_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, far = torch.randn(16, 64).bfloat16(), torch.arange(5000, 5016)
    (seen, *_) = _models(monkeypatch, InFloat32().eval().bfloat16(), x, far)
    assert seen["MatMul f32"] == 1, "the product of float32 numbers"
    assert seen["Cos f32"] == 1


def test_a_model_of_float32_has_nothing_to_shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    (seen, *_) = _models(monkeypatch, Gated().eval(), torch.randn(1, 16, 64))
    assert seen["MatMul f32"] >= 3 and not any(kind.endswith(" bf16") for kind in seen)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 3e38, 1e-40, 2.0**-126])
def test_edges_of_bfloat16(value: float) -> None:
    torch.manual_seed(0)
    model = Gated().eval().bfloat16()
    x = torch.randn(1, 16, 64).bfloat16()
    fast = intarsia.compile(model, (x,), engines=["openvino"])
    x[0, 3, 5] = value
    with torch.no_grad():
        found, expected = fast(x), model(x)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-5, equal_nan=True)
