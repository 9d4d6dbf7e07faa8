"""Attention joined with elementwise layers ended the process when OpenVINO compiled it; it answers since."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate, scaled_dot_product_attention

import intarsia
from intarsia.engines import OpenVINO
from intarsia.engines.openvino.core import settings

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
