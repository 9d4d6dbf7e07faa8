"""The shipped patterns together: by measured benefit, by name, all, none; remembered; whole models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.convert.interpreter import convert
from intarsia.engines import NetworkEngine, OnnxRuntime, OpenVINO, Program
from intarsia.errors import RewriteError
from intarsia.lower.lowering import lower
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import FUSIONS, Benefits, apply
from intarsia.rewrite.apply import engine_key, measure

ENGINES: dict[str, NetworkEngine] = {"onnxruntime": OnnxRuntime(threads=1), "openvino": OpenVINO(threads=1)}
ORT = ENGINES["onnxruntime"]


def silu_network() -> Network:
    net = Network()
    with net_guard(net):
        x = F.identity(F.neg(Tensor("x", torch.float32, (2, 4))))
        (x * F.sigmoid(x)).mark_output("y")
    return net


def kinds(net: Network) -> list[str]:
    return [layer.kind for layer in net.get_layers()]


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    net = silu_network()
    log = apply(net, engine=ORT, measure=False, cache=tmp_path / "known.json")
    assert kinds(net) == ["Neg", "Sigmoid", "Mul"]
    assert log.skipped == {"silu": "it was not measured with onnxruntime on this machine"}


@pytest.mark.parametrize(("ratio", "applied"), [(0.5, True), (1.7, False)])
def test_what_was_measured_decides(tmp_path: Path, ratio: float, applied: bool) -> None:
    path = tmp_path / "deep" / "known.json"
    Benefits(path).remember(ORT, "silu", ratio)
    net = silu_network()
    log = apply(net, engine=ORT, measure=False, cache=path)
    assert ("com.microsoft::QuickGelu" in kinds(net)) == applied
    assert log.skipped == (
        {} if applied else {"silu": "it takes 1.70 of the time without it, with onnxruntime"}
    )


def test_a_build_measures_once_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    built: list[str] = []

    @dataclass(frozen=True)
    class Counting(OnnxRuntime):
        def build(self, net: Network) -> Program:
            built.append(net.name)
            return super().build(net)

    apply(silu_network(), engine=Counting())
    assert built == ["silu", "silu"]
    apply(silu_network(), engine=Counting())
    assert len(built) == 2
    kept = json.loads((tmp_path / "rewrite.json").read_text())
    assert list(kept) == [engine_key(Counting())] and list(kept[engine_key(Counting())]) == ["silu"]


@pytest.mark.filterwarnings("ignore:cannot read")
def test_a_damaged_memory_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.write_text('{"onnxruntime')
    known = Benefits(path)
    assert known.get(ORT, "silu") is None
    known.remember(ORT, "silu", 0.25)
    assert known.get(ORT, "silu") == 0.25


def test_all_named_and_off() -> None:
    net = silu_network()
    before = str(net)
    assert not apply(net, engine=ORT, patterns=False).fired and str(net) == before
    assert apply(net, engine=ORT, patterns=["silu"]).counts() == {"silu": 1}
    net = silu_network()
    assert apply(net, engine=ORT, patterns=True).counts() == {"identity": 1, "silu": 1}
    net = silu_network()
    assert apply(net, engine=ENGINES["openvino"], patterns="all").counts() == {"identity": 1}
    with pytest.raises(RewriteError, match="there is no pattern 'swish'"):
        apply(net, engine=ORT, patterns=["swish"])
    with pytest.raises(RewriteError, match="openvino does not know the layers that pattern 'silu' makes"):
        apply(net, engine=ENGINES["openvino"], patterns="silu")
    net = silu_network()
    assert len(apply(net, engine=ORT, patterns=True, limit=1)) == 1


def test_measuring_gives_a_ratio() -> None:
    ratio = measure(FUSIONS["conv_batch_norm"], ENGINES["onnxruntime"].build, seconds=0.05)
    assert 0 < ratio < 100


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-12) * self.weight + self.bias


class PlainBertLayer(nn.Module):
    """As BERT was first written in PyTorch: attention by two products and a softmax, erf, own norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + mask
        context = torch.matmul(nn.functional.softmax(scores, dim=-1), v)
        context = context.permute(0, 2, 1, 3).contiguous().view(x.shape)
        x = self.norm1(self.out(context) + x)
        h = self.up(x)
        h = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
        return self.norm2(self.down(h) + x)


class PlainBert(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainBertLayer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = (1.0 - keep[:, None, None, :]) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_plain_bert_is_recognised_whole(engine: str) -> None:
    torch.manual_seed(0)
    model = PlainBert().eval()
    keep = torch.ones(2, 5)
    keep[1, 3:] = 0
    args = (torch.randn(2, 5, 16), keep)
    net = convert(lower(capture(model, args), lambda target: target in registry).module)
    off = str(net)
    assert not apply(net, engine=ENGINES[engine], patterns=False).fired and str(net) == off
    log = apply(net, engine=ENGINES[engine], patterns=True)
    assert not log.broken
    counts = log.counts()
    assert (counts["attention"], counts["layer_norm"], counts["gelu_exact"]) == (2, 4, 2)
    assert counts["merged_projections"] == 2
    net.verify()
    (made,) = ENGINES[engine].build(net)(*args)
    torch.testing.assert_close(made, model(*args), rtol=1e-4, atol=1e-5)
    fused = next(
        layer for layer in net.get_layers() if layer.node.metadata_props.get("pattern") == "gelu_exact"
    )
    assert "test_apply.py" in fused.node.metadata_props["source"]
