"""Attention joined with elementwise layers, and products: what OpenVINO got wrong, or died of."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

import intarsia
from intarsia.engines import OpenVINO
from intarsia.engines.openvino import core as runtime
from intarsia.engines.openvino.core import settings
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite.fusions import FUSIONS
from intarsia.rewrite.manager import RewritePatternManager

openvino = pytest.importorskip("openvino")
ov = pytest.importorskip("openvino.opset13")


class Model(nn.Module):
    def __init__(self, body: Callable[..., object]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(x)


def attention(x: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(x, x, x)


def by_products(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1) @ x


def _chosen(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = torch.where(a > 0.5, a, b)
    return chosen.sum(), b, chosen @ chosen


ENDED = {
    "a maximum added": lambda x: torch.relu(x.amax(-1, keepdim=True) + attention(x)),
    "a minimum multiplied": lambda x: torch.exp(x.amin(-1, keepdim=True) * attention(x)),
    "resized": lambda x: interpolate(x.amax(0) + attention(x), scale_factor=2.0, mode="bilinear"),
    "summands handed out": lambda x: (torch.relu(x), attention(x), torch.relu(torch.relu(x) + attention(x))),
    "by products": lambda x: (torch.abs(torch.relu(x) + by_products(x)), torch.relu(x) + by_products(x)),
    "after a layer": lambda x: _chosen(x.abs(), attention(x.abs()) * 0.7),
}


@pytest.mark.parametrize("body", ENDED.values(), ids=ENDED)
def test_attention_joined_with_elementwise_layers(body: Callable[..., object]) -> None:
    x = torch.randn(2, 3, 4, 4)
    fast = intarsia.compile(Model(body), (x,), engines=[OpenVINO()])
    assert "openvino" in [segment.engine for segment in fast.plan.segments]
    torch.testing.assert_close(fast(x), body(x), rtol=1e-4, atol=1e-5)


def test_layers_are_put_together_elsewhere() -> None:
    """Attention is projected in models: they keep OpenVINO's faster kernels."""
    x = ov.parameter((1, 4, 4, 4), np.float32)
    weight = ov.constant(np.full((4, 4), 0.5, np.float32))
    attended = ov.scaled_dot_product_attention(x, x, x, causal=False)
    projected = ov.matmul(ov.transpose(attended, ov.constant(np.array([0, 2, 1, 3]))), weight, False, False)
    assert not settings(openvino.Model([ov.relu(ov.add(ov.relu(x), projected))], [x]))
    assert settings(openvino.Model([ov.relu(ov.add(ov.relu(x), attended))], [x]))


# A layer that changes no number makes OpenVINO multiply by oneDNN instead of MLAS.


pytest.importorskip("openvino")
FUSION = FUSIONS["onednn_product"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MLAS is in OpenVINO for x86_64 only")
def test_it_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should OpenVINO choose otherwise one day, the pattern has no reason to be."""
    kernels: list[str] = []
    core = runtime.core()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def compile_model(self, model: Any, *how: Any) -> Any:
            compiled = core.compile_model(model, *how)
            layers = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ops()]
            kernels.extend(
                layer["primitiveType"].astype(str)
                for layer in layers
                if layer["layerType"].astype(str) == "FullyConnected"
            )
            return compiled

    monkeypatch.setattr(runtime, "core", Watched)
    for rewritten in (False, True):
        net = FUSION.sample(np.random.default_rng(0))
        if rewritten:
            manager = RewritePatternManager()
            manager.add(FUSION.name, FUSION.pattern)
            assert manager.rewrite(net).fired
        OpenVINO(threads=1).build(net)
    plain, followed = kernels
    assert "mlas" in plain and "mlas" not in followed, kernels


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-42])
def test_special_values_stay(value: float) -> None:
    model = nn.Linear(512, 512, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(512))
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[5, 7] = value
    unguarded = OpenVINO(guards=False, threads=1)
    fast = intarsia.compile(model, (x,), engines=[unguarded], rewrite=["onednn_product"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_the_added_layer_changes_no_number(value: float) -> None:
    net = Network()
    with net_guard(net):
        F.leaky_relu(Tensor("x", torch.float32, (4,)), 1.0).mark_output("y")
    x = torch.tensor([value, 1.5, -2.0, -value])
    (y,) = OpenVINO(guards=False, threads=1).build(net)(x)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.nan_to_num().view(torch.int32), x.nan_to_num().view(torch.int32))
