"""A layer that changes no number makes OpenVINO multiply by oneDNN instead of MLAS."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OpenVINO
from intarsia.engines.openvino import core as runtime
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite.fusions import FUSIONS
from intarsia.rewrite.manager import RewritePatternManager

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
