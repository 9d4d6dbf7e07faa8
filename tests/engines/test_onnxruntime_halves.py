"""ONNX Runtime computes float16 in float32 on every processor: its kernels for ARM would add up halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.checker
import onnx.parser
import onnx.shape_inference
import pytest
import torch
from tests.convert.programs import answers, network_of
from torch import nn

import intarsia
from intarsia.cache.machine import is_arm
from intarsia.engines.onnxruntime.corrections import compute_in_float32
from intarsia.engines.onnxruntime.model import guarded
from intarsia.network import Network

aten = torch.ops.aten
on_arm = pytest.mark.skipif(not is_arm(), reason="ONNX Runtime casts by itself on this processor")


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).half()


def close(answer: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().max())
    torch.testing.assert_close(answer, expected, rtol=2**-10, atol=largest * 2**-10)


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (aten.mm.default, (halves(8, 1024), halves(1024, 16))),
    "product of a vector": (aten.mv.default, (halves(8, 1024), halves(1024))),
    "sum": (aten.sum.dim_IntList, (halves(4, 4096), [1])),
    "grouped convolution": (
        aten.conv2d.default,
        (halves(1, 4, 9, 8), halves(6, 2, 3, 2), None, [1], [0], [1], 2),
    ),
    "convolution of volumes": (
        aten.conv3d.default,
        (halves(1, 6, 5, 5, 5), halves(6, 2, 3, 3, 3), halves(6), [1], [0], [1], 3),
    ),
    "gelu": (aten.gelu.default, (halves(64, 64) * 4,)),
    "erf": (aten.erf.default, (halves(64, 64),)),
    "softmax": (aten._softmax.default, (halves(4, 2000), 1, False)),
    "mean of windows": (aten.adaptive_avg_pool2d.default, (halves(1, 8, 4, 3), [5, 5])),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_near_as_pytorch_itself(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    answer, expected = answers(call[0], *call[1])
    close(answer, expected)


class Model(nn.Module):
    """Weights that are packed, one that is read twice, and layers of several results."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
        self.out = nn.Linear(64, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.layer(self.words(places))
        best, where = x.topk(3)
        return self.out(x), best, where


def test_a_model_and_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, places = Model().half().eval(), torch.arange(14).view(2, 7)
    fast = intarsia.compile(model, (places,), engines=["onnxruntime"])
    intarsia.save(fast, tmp_path / "model.inlay")
    loaded = intarsia.load(tmp_path / "model.inlay")
    with torch.no_grad():
        expected = model(places)
        for answer in (fast(places), loaded(places)):
            for one, other in zip(answer[:2], expected[:2], strict=True):
                close(one, other)


def kinds(graph: Any) -> Counter[str]:
    return Counter(node.op_type for node in graph.node)


@on_arm
def test_a_product_stands_between_casts() -> None:
    net = network_of(aten.mm.default, halves(2, 4), halves(4, 2))
    assert kinds(guarded(net, True, "cpu").proto.graph) == {"Cast": 3, "MatMul": 1}
    assert kinds(guarded(net, True, "cuda").proto.graph) == {"MatMul": 1}


def rewritten(text: str) -> onnx.ModelProto:
    """A model given as text, which stays valid to the last type."""
    model = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}')
    )
    compute_in_float32(Network("of none"), model)
    onnx.checker.check_model(model, full_check=True)
    return model


def test_what_moves_between_layers_that_compute_is_float32() -> None:
    model = rewritten("""
        agraph (float16[2,3] x, float16[2,3] y) => (float16[3,2] z, float16[2,3] kept)
        <float16[1] big = {2}> {
            kept = Concat <axis=0> (x)
            a = Mul(x, y)
            b = Transpose <perm=[1,0]> (a)
            c = Add(b, big)
            d = Identity(c)
            z = Gelu(d)
        }
    """)
    assert [node.op_type for node in model.graph.node] == [
        *("Concat", "Cast", "Cast", "Mul", "Transpose", "Cast", "Add", "Identity", "Gelu", "Cast")
    ]


def test_what_is_left_out_or_made_twice() -> None:
    model = rewritten("""
        agraph (float16[2,4] x) => (float16[2,2] best, int64[2,2] places, float16[2,4] held) {
            two = Constant <value = int64[1] {2}> ()
            best, places = TopK(x, two)
            high = Constant <value = float16 {1}> ()
            held = Clip(x, , high)
        }
    """)
    clip = next(node for node in model.graph.node if node.op_type == "Clip")
    assert clip.input[1] == ""
    assert kinds(model.graph) == {"Constant": 2, "TopK": 1, "Clip": 1, "Cast": 4}


def test_bodies_read_what_is_computed_around_them() -> None:
    model = rewritten("""
        agraph (bool c, float16[2,2] x, float16[2,2] y) => (float16[2,2] z) {
            a = Mul(x, y)
            z = If (c) <
                then_branch = one () => (float16[2,2] then) { then = MatMul(a, y) },
                else_branch = two () => (float16[2,2] other) { other = Identity(a) }
            >
        }
    """)
    assert [node.op_type for node in model.graph.node] == ["Cast", "Cast", "Mul", "If"]
    then, other = (attribute.g for attribute in model.graph.node[-1].attribute)
    assert kinds(then) == {"MatMul": 1, "Cast": 1}
    assert kinds(other) == {"Identity": 1, "Cast": 1}


def test_reductions_of_what_is_scattered_are_computed() -> None:
    text = """
        agraph (float16[4] x, int64[2] i, float16[2] u) => (float16[4] z) {
            z = ScatterElements <HOW> (x, i, u)
        }
    """
    assert kinds(rewritten(text.replace("HOW", "axis = 0")).graph) == {"ScatterElements": 1}
    added = rewritten(text.replace("HOW", 'axis = 0, reduction = "add"'))
    assert kinds(added.graph) == {"ScatterElements": 1, "Cast": 3}


def test_zero_keeps_its_sign_whatever_is_computed_before() -> None:
    class Chosen(nn.Module):
        def forward(self, c: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 1 / torch.where(c, x * 2, y)

    given = torch.tensor([True, False]), torch.tensor([-0.0, 1.0]).half(), torch.tensor([1.0, -0.0]).half()
    fast = intarsia.compile(Chosen(), given, engines=["onnxruntime"], min_block_size=1)
    assert fast(*given).tolist() == [-torch.inf, -torch.inf]
