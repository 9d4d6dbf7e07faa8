"""The dry run tells every node's engine and reason, every border, and what would help."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines import OnnxRuntime
from intarsia.errors import CaptureError, PartitionError
from intarsia.report import explain

pytest.importorskip("onnxruntime")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.special.bessel_j0(self.first(x))).relu()


X = torch.rand(4, 64)


def test_every_node_has_op_module_source_engine_and_reason(monkeypatch) -> None:
    monkeypatch.setattr(OnnxRuntime, "build", lambda *_: pytest.fail("an engine was built"))
    told = explain(Block(), (X,), engines="onnxruntime", min_block_size=1)
    refused = next(node for node in told.nodes if "bessel" in node.op)
    assert refused.engine == "pytorch" and refused.reasons["onnxruntime"]
    assert "test_explain.py:" in refused.source
    assert {node.module for node in told.nodes} == {"", "first", "second"}
    assert [segment.engine for segment in told.segments] == ["onnxruntime", "pytorch", "onnxruntime"]
    assert told.segments[1].shapes.bytes_in == told.segments[1].shapes.bytes_out == 4 * 64 * 4
    (advice,) = told.advice
    assert advice.op.startswith("aten.special_bessel_j0") and (advice.before, advice.after) == (3, 1)


def test_text_json_and_html_agree() -> None:
    told = explain(Block(), (X,), engines="onnxruntime", min_block_size=1)
    content = json.loads(told.to_json())
    assert [segment["engine"] for segment in content["segments"]] == ["onnxruntime", "pytorch", "onnxruntime"]
    assert len(content["nodes"]) == len(told.nodes) == sum(s["nodes"] for s in content["segments"])
    assert content["segments"][0]["shapes"]["inputs"][0]["sizes"] == [4, 64]
    text = str(told)
    assert "Plan by dependency: 3 segments" in text
    assert "in 1.0 KiB, out 1.0 KiB" in text
    assert "3 segments would become 1" in text
    assert "bessel_j0" in told.to_html()
    assert told.to_json() == explain(Block(), (X,), engines="onnxruntime", min_block_size=1).to_json()


def test_unknown_strategy_and_doubled_options() -> None:
    with pytest.raises(PartitionError, match="no partition strategy 'best'; known are greedy"):
        explain(Block(), (X,), partition="best")
    from intarsia.partition import PartitionOptions

    with pytest.raises(PartitionError, match="both given"):
        explain(Block(), (X,), options=PartitionOptions(), min_block_size=2)


class Decides(nn.Module):
    """A model that is compiled in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y + 1 if y.sum() > 0 else y)


def test_parts_are_explained_as_they_are_compiled() -> None:
    model, x = Decides().eval(), torch.randn(4, 8)
    options: Any = {"engines": ["onnxruntime"], "min_block_size": 1, "torch_executed_modules": ["second"]}
    explanation, fast = intarsia.explain(model, (x,), **options), intarsia.compile(model, (x,), **options)
    assert list(explanation.bodies) == list(fast.parts) == ["first"]
    assert explanation.bodies["first"].plan.engines == fast.parts["first"].plan.engines
    text = str(explanation)
    assert "not captured as a whole" in text and "second runs as it is: no engine takes any of it" in text
    explanation.to_json()
    with pytest.raises(CaptureError):
        intarsia.explain(model, (x,), fallback="error")
