"""The user's choices with real engines: they are followed, and the answers stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import PartitionError
from intarsia.graph.nodes import op_name
from intarsia.partition import PartitionOptions

pytest.importorskip("onnxruntime", reason="an engine under test")
pytest.importorskip("openvino", reason="an engine under test")

BOTH = ["onnxruntime", "openvino"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        with intarsia.run_on("openvino"):
            x = x.mean((2, 3)).tanh()
        return self.head(x).softmax(-1)


X = torch.rand(2, 3, 8, 8)


def compiled(**choices) -> intarsia.Compiled:
    torch.manual_seed(0)
    model = Net().eval()
    fast = intarsia.compile(model, (X,), engines=BOTH, **choices)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)
    return fast


def placed(fast: intarsia.Compiled) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for segment in fast.plan.segments:
        found.setdefault(segment.engine, []).extend(op_name(node).split(".")[1] for node in segment.nodes)
    return found


@pytest.mark.parametrize("partition", ["greedy", "dependency", "hierarchical"])
def test_run_on_picks_the_engine(partition: str) -> None:
    fast = compiled(partition=partition, min_block_size=1)
    assert placed(fast)["openvino"] == ["mean", "tanh"]
    assert [segment.engine for segment in fast.plan.segments] == ["onnxruntime", "openvino", "onnxruntime"]


def test_modules_and_ops_stay_in_pytorch() -> None:
    fast = compiled(min_block_size=1, torch_executed_modules=[nn.GELU], torch_executed_ops=["aten::relu"])
    assert sorted(placed(fast)["pytorch"]) == ["gelu", "relu"]
    assert "torch_executed_modules names head.1" in str(fast.plan)


def test_hierarchy_by_op_names() -> None:
    options = PartitionOptions(
        min_block_size=1,
        backend_priority=("openvino", "onnxruntime"),
        backend_support_map={
            "openvino": ["aten::conv2d", "aten::mean", "aten::tanh"],
            "onnxruntime": ["aten::linear"],
        },
    )
    found = placed(compiled(partition="hierarchical", options=options))
    assert found["openvino"] == ["conv2d", "mean", "tanh"]
    assert found["onnxruntime"] == ["linear", "linear"]
    assert {"gelu", "softmax"} <= set(found["pytorch"])


def test_a_budget_builds_smaller_engines() -> None:
    options = PartitionOptions(min_block_size=1, memory_budget={"onnxruntime": 900})
    fast = compiled(options=options)
    assert fast.plan.count("onnxruntime") > 2


def test_full_compilation_raises_one_error_with_every_reason() -> None:
    fast = compiled(require_full_compilation=True)
    assert fast.plan.on_engines == 1
    with pytest.raises(
        PartitionError, match=r"2 nodes cannot run on an engine(.|\n)*torch_executed_ops names"
    ):
        compiled(require_full_compilation=True, torch_executed_ops=["aten::linear"])
