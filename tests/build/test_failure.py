"""Failure is not fatal: what an engine cannot do leaves that engine, alone, and the plan tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import intarsia
from intarsia.convert import ConversionContext, converter, registry
from intarsia.engines import NetworkEngine, OnnxRuntime, Program
from intarsia.errors import EngineError, PartitionError
from intarsia.network import Network, Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


class Net(nn.Module):
    """Six operators, of which `erf` is the one that will fail."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.erf(torch.tanh(x * 2) + 1) - 0.5)


@dataclass(frozen=True)
class Faulty(OnnxRuntime):
    """ONNX Runtime with one operator that goes wrong, in the way asked for."""

    fault: str = "build"
    name: ClassVar[str] = "faulty"

    def build(self, net: Network) -> Program:
        spoilt = any(layer.kind == "Erf" for layer in net.get_layers())
        if spoilt and self.fault == "build":
            raise EngineError("the Erf kernel is broken")
        program = super().build(net)
        if not spoilt or self.fault == "build":
            return program

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if self.fault == "run":
                raise RuntimeError("the Erf kernel fell over")
            return tuple(t + 0.25 for t in program(*tensors))

        return run


def placed(plan: Any) -> dict[str, str]:
    return {str(node.target): segment.engine for segment in plan.segments for node in segment.nodes}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("build", "the Erf kernel is broken"),
        ("run", "faulty failed to run it: RuntimeError: the Erf kernel fell over"),
        ("answer", "faulty answers wrongly: output 0 is off by"),
    ],
)
def test_only_the_offending_node_leaves(fault: str, reason: str) -> None:
    x = torch.randn(4, 5)
    fast = intarsia.compile(Net(), (x,), engines=[Faulty(fault=fault)], min_block_size=1)
    torch.testing.assert_close(fast(x), Net()(x), rtol=1e-5, atol=1e-6)
    engines = placed(fast.plan)
    assert engines.pop("aten.erf.default") == "pytorch"
    assert set(engines.values()) == {"faulty"}, fast.plan
    assert reason in str(fast.plan)


@pytest.mark.openvino
def test_the_next_engine_takes_what_one_cannot() -> None:
    x = torch.randn(4, 5)
    fast = intarsia.compile(Net(), (x,), engines=[Faulty(), "openvino"], min_block_size=1)
    assert placed(fast.plan)["aten.erf.default"] == "openvino"
    torch.testing.assert_close(fast(x), Net()(x), rtol=1e-5, atol=1e-5)


def test_full_compilation_lists_what_failed() -> None:
    with pytest.raises(PartitionError, match=r"(?s)aten.erf.default.*the Erf kernel is broken"):
        intarsia.compile(Net(), (torch.randn(4, 5),), engines=[Faulty()], require_full_compilation=True)


def _raises(ctx: ConversionContext, self: Tensor) -> Tensor:
    raise ZeroDivisionError("an author's mistake")


def _lies_about_dtype(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.cast(self, torch.int64)


def _lies_about_shape(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.reshape(self, [-1])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_raises, "the converter _raises failed: ZeroDivisionError: an author's mistake"),
        (_lies_about_dtype, "the converter returned INT64 where torch returns FLOAT"),
        (_lies_about_shape, "the converter returned 1 dimensions where torch returns 2"),
    ],
)
def test_a_bad_converter_costs_its_node_only(function: Callable[..., Any], reason: str) -> None:
    bad = converter(aten.erf.default, register=False)(function)
    x = torch.randn(4, 5)
    with registry.override(bad, without=aten.erf.default):
        fast = intarsia.compile(Net(), (x,), engines=["onnxruntime"], min_block_size=1)
    assert placed(fast.plan)["aten.erf.default"] == "pytorch"
    assert reason in str(fast.plan)
    torch.testing.assert_close(fast(x), Net()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.openvino
def test_a_dtype_without_kernels_goes_to_pytorch() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), nn.Mish(), nn.Conv1d(3, 3, 1)).double().eval()
    for engine in ("onnxruntime", "openvino"):
        fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
        torch.testing.assert_close(fast(x), model(x).detach())


def test_no_engine_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia.engines import OpenVINO

    def gone(hint: str) -> Callable[[NetworkEngine], str]:
        return lambda self: hint

    monkeypatch.setattr(OnnxRuntime, "unavailable", gone("pip install 'intarsia[onnxruntime]'"))
    monkeypatch.setattr(OpenVINO, "unavailable", gone("pip install 'intarsia[openvino]'"))
    x = torch.randn(2, 3)
    fast = intarsia.compile(Net(), (x,))
    torch.testing.assert_close(fast(x), Net()(x))
    assert any("intarsia[onnxruntime]" in note for note in fast.notes)
    with pytest.raises(EngineError, match=r"engine 'openvino' cannot be used: pip install"):
        intarsia.compile(Net(), (x,), engines=["openvino"])
    with pytest.raises(EngineError, match="there is no engine 'tensorrt'"):
        intarsia.compile(Net(), (x,), engines=["tensorrt"])


class Unexportable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


def test_a_model_that_cannot_be_exported_names_the_line() -> None:
    from intarsia.errors import CaptureError

    with pytest.raises(CaptureError, match=r"test_failure.py:\d+ \(in forward\)") as caught:
        intarsia.compile(Unexportable(), (torch.randn(3),), fallback="error")
    assert 'torch.compile(model, backend="intarsia") may still work' in str(caught.value)
