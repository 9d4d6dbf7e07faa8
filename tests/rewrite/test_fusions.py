"""Every shipped pattern: text before and after, equal numbers everywhere, a place it refuses and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from intarsia.engines import NetworkEngine, OnnxRuntime, OpenVINO
from intarsia.errors import RewriteError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.network.value import MICROSOFT
from intarsia.rewrite import FUSIONS, RewritePatternManager, apply, check_pattern
from intarsia.rewrite.check import KINDS
from intarsia.rewrite.fusions.fusion import given

GOLDENS = Path(__file__).parent / "goldens"
ORT = OnnxRuntime(threads=1)
ENGINES: tuple[NetworkEngine, ...] = (ORT, OpenVINO(threads=1))
BUILD = {engine.name: engine.build for engine in ENGINES}


def manager_of(name: str) -> RewritePatternManager:
    manager = RewritePatternManager()
    manager.add(name, FUSIONS[name].pattern)
    return manager


@pytest.mark.parametrize("name", list(FUSIONS))
def test_text_before_and_after(name: str) -> None:
    net = FUSIONS[name].sample(np.random.default_rng(3))
    before = str(net)
    log = manager_of(name).rewrite(net)
    net.verify()
    text = f"{before}\n\n{net}\n\n{log}\n"
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert log.fired


FINITE = ("plain", "large")


@pytest.mark.parametrize("name", list(FUSIONS))
def test_equal_numbers_by_definition(name: str) -> None:
    fusion = FUSIONS[name]
    if fusion.group == "com.microsoft":
        pytest.skip("its layers are ONNX Runtime's own, which ONNX does not define")
    kinds = FINITE if fusion.finite_only else KINDS
    assert check_pattern(fusion.pattern, fusion.sample, trials=20, kinds=kinds).fired == 20


GUARDED = {
    "attention_bias", "group_norm", "grouped_heads", "layer_norm", "layer_norm_plain", "layer_norm_scaled",
    "multi_head_attention", "residual_norm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine.name) for name, fusion in FUSIONS.items() for engine in ENGINES if fusion.suits(engine)],
)
def test_equal_numbers_on_engines(name: str, engine: str) -> None:
    fusion = FUSIONS[name]
    trials = 12 if engine == "onnxruntime" else 3
    # OpenVINO hands calls that hold NaN to PyTorch; attention and norms do so on both engines.
    guarded = engine == "openvino" or name in GUARDED
    kinds = FINITE if fusion.finite_only or guarded else KINDS
    checked = check_pattern(fusion.pattern, fusion.sample, trials=trials, build=BUILD[engine], kinds=kinds)
    assert checked.fired == trials


def centred(x: Tensor, axis: int) -> Tensor:
    c = x - F.reduce_mean(x, [axis])
    return c / F.sqrt(F.reduce_mean(c * c, [axis]) + 1e-5)


def const(*shape: int, value: float = 0.5) -> Tensor:
    return F.constant(np.full(shape, value, np.float32))


def fragments(
    mask: tuple[int, ...] | None = None, fill: float | None = None, scale: tuple[int, ...] | None = None
) -> Tensor:
    q, k, v = (given(name, 2, 3, 4, 4) for name in "qkv")
    scores = F.matmul(q, F.transpose(k, (0, 1, 3, 2)))
    if scale is not None:
        scores = scores * const(*scale)
    if mask is not None and fill is None:
        scores = scores + given("mask", *mask)
    if mask is not None and fill is not None:
        scores = F.where(Tensor("mask", torch.bool, mask), scores, fill)
    return F.matmul(F.softmax(scores), v)


def kv_heads(shape: tuple[int, ...]) -> Tensor:
    x = F.unsqueeze(given("k", 2, 2, 4, 5), [1])
    y = F.reshape(F.expand(x, (1, 3, 1, 1, 1)), shape)
    z = F.reshape(F.expand(F.unsqueeze(given("v", 2, 2, 4, 5), [1]), (1, 3, 1, 1, 1)), shape)
    return F.attention(given("q", 2, 6, 4, 5), y, z)


def rows(order: tuple[int, int, int, int]) -> Tensor:
    q, k, v = (F.transpose(F.reshape(given(n, 2, 4, 6), (2, 4, 2, 3)), (0, 2, 1, 3)) for n in "qkv")
    return F.reshape(F.transpose(F.attention(q, k, v), order), (2, 4, 6))


def rotary(repeated: bool) -> Tensor:
    x, angles = given("x", 1, 2, 3, 4), given("angles", 1, 3, 4)
    both = F.concat([F.slice(angles, 0, 2, axis=2)] * 2, axis=2) if repeated else angles
    cos, sin = F.unsqueeze(F.cos(both), [1]), F.unsqueeze(F.sin(both), [1])
    turned = F.concat([F.neg(F.slice(x, 2, 4, axis=3)), F.slice(x, 0, 2, axis=3)], axis=3)
    return x * cos + turned * sin


def multi_head(bias: tuple[int, ...]) -> Tensor:
    q, k, v = (given(n, 2, 4, 6) + const(*bias) for n in "qkv")
    makes = [(torch.float32, (2, 4, 6))]
    return F.opaque(MICROSOFT, "MultiHeadAttention", q, k, v, makes=makes, num_heads=2)[0]


def three_products() -> Tensor:
    x = given("x", 2, 3)
    bias = [const(4), const(4), None]
    q, k, v = (F.gemm(x, const(4, 3, value=i + 1.0), bias[i], trans_b=True) for i in range(3))
    return q + k + v


def grouped(scale: float) -> Tensor:
    x = given("x", 2, 4, 3, 3)
    y = F.instance_norm(
        F.reshape(x, (2, 2, 18)), np.full(2, scale, np.float32), np.zeros(2, np.float32), 1e-5
    )
    return F.reshape(y, (2, 4, 3, 3)) * const(4, 1, 1) + const(4, 1, 1)


def convolved() -> Tensor:
    ones = (1, 1)
    return F.conv(given("x", 1, 2, 5, 5), given("w", 3, 2, 3, 3), strides=ones, pads=(0,) * 4, dilations=ones)


# pattern: (what is written, the layer asked about, what it says)
NEGATIVE: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "identity": (lambda: F.transpose(given("x", 2, 2), (1, 0)), "transpose", "transpose changes its input"),
    "constant_folding": (lambda: F.neg(F.abs(given("x", 2))), "abs", "not all of its inputs are constant"),
    "common_subexpression": (
        lambda: (lambda x: F.neg(F.softmax(x, 0)) + F.softmax(x, 1))(given("x", 2, 2)),
        "softmax",
        "no other layer does the same",
    ),
    "redundant_casts": (
        lambda: F.cast(F.cast(given("x", 2), ir.DataType.INT32), ir.DataType.FLOAT),
        "cast_1",
        "INT32 does not hold every FLOAT",
    ),
    "transpose_transpose": (
        lambda: F.transpose(F.relu(F.transpose(given("x", 2, 2), (1, 0))), (1, 0)),
        "transpose_1",
        "relu is made by Relu, not Transpose",
    ),
    "transpose_sunk": (
        lambda: F.transpose(F.softmax(F.transpose(given("x", 2, 2), (1, 0))), (1, 0)),
        "transpose_1",
        "softmax (Softmax) is not elementwise",
    ),
    "reshape_reshape": (
        lambda: F.op("Reshape", F.reshape(given("x", 2, 3), (3, 2)), F.ints([0, 2])),
        "reshape_1",
        "sizes [0, 2] copy from, or make, an empty dimension",
    ),
    "squeeze_unsqueeze": (
        lambda: F.squeeze(F.unsqueeze(given("x", 1, 2), [2]), [0]),
        "squeeze",
        "axes [2] and [0] are not the same",
    ),
    "attention": (
        lambda: fragments(mask=(2, 3, 4, 4), fill=-1e9),
        "matmul_1",
        "a row hidden whole by mask gets equal weights from -1000000000.0, none from a mask",
    ),
    "grouped_heads": (
        lambda: kv_heads((2, 6, 4, 5)),
        "attention",
        "is repeated along [1], not along the axis after its heads",
    ),
    "multi_head_attention": (
        lambda: rows((0, 1, 2, 3)),
        "reshape_3",
        "perm of transpose_3 is [0, 1, 2, 3], not [0, 2, 1, 3]",
    ),
    "attention_bias": (lambda: multi_head((4, 6)), "multiheadattention", "the bias of q is [4, 6]"),
    "rotary_embedding": (lambda: rotary(False), "add", "unsqueeze may have two different halves"),
    "layer_norm": (
        lambda: centred(given("x", 4, 4), 0) * const(4) + const(4),
        "add_1",
        "it works over axes [0] of 2, not over the last ones",
    ),
    "layer_norm_scaled": (
        lambda: centred(given("x", 4, 4), 1) * const(4, 1),
        "mul_1",
        "the weight is [4, 1], not [4]",
    ),
    "layer_norm_plain": (
        lambda: centred(given("x", 4, "n"), 1),
        "div",
        "the sizes ['n'] are not known",
    ),
    "rms_norm": (
        lambda: (lambda x: x / F.sqrt(F.reduce_mean(x * x, [1]) + 1e-6) * const(2, 1))(given("x", 2, 4)),
        "mul_1",
        "the weight is [2, 1], not [4]",
    ),
    "group_norm": (lambda: grouped(2.0), "add", "the groups are scaled before the channels are"),
    "residual_norm": (
        lambda: F.layer_norm(given("x", 2, 3, 4) + given("y", 4), const(4), const(4)),
        "layernormalization",
        "the sum is of [2, 3, 4] and [4]",
    ),
    "gelu_exact": (
        lambda: (lambda x: x * 0.5 * (F.erf(x / 1.5) + 1.0))(given("x", 3)),
        "mul_1",
        "is not the constant 1.41421",
    ),
    "gelu_tanh": (
        lambda: (lambda x: x * 0.5 * (F.tanh((x + F.pow(x, 3.0) * 0.05) * 0.7978845608) + 1.0))(
            given("x", 3)
        ),
        "mul_3",
        "is not the constant 0.044715",
    ),
    "quick_gelu": (
        lambda: (lambda x: x * F.sigmoid(x * 1.5))(given("x", 3)),
        "mul_1",
        "is not the constant 1.702",
    ),
    "silu": (lambda: given("y", 3) * F.sigmoid(given("x", 3)), "mul", "x is both y and x"),
    "bias_gelu": (
        lambda: F.gelu(given("x", 3, 4) + const(3, 1)),
        "gelu",
        "the bias is [3, 1], the input [3, 4]",
    ),
    "conv_batch_norm": (
        lambda: F.batch_norm(convolved(), const(3), const(3), const(3), const(3), 1e-5),
        "batchnormalization",
        "w is w, which is not constant",
    ),
    "conv_relu": (lambda: F.relu(convolved()), "relu", "w is w, which is not constant"),
    "linear_bias": (
        lambda: F.matmul(given("x", 2, 3, 4), const(4, 5)) + const(5),
        "add",
        "the product is of 3 and 2 dimensions, not of matrices",
    ),
    "scale_into_weight": (
        lambda: F.matmul(given("x", 2, 3), const(3, 4)) * const(4),
        "mul",
        "the scale is [4], not one number",
    ),
    "merged_projections": (three_products, "gemm", "some have a bias and some have none"),
    "onednn_product": (
        lambda: F.gemm(given("x", 8, 512), const(512, 512)),
        "gemm",
        "the input has 8 rows; the rewrite needs 64 to be faster",
    ),
}


@pytest.mark.parametrize("name", list(FUSIONS))
def test_a_place_it_refuses_and_why(name: str) -> None:
    write, layer_name, reason = NEGATIVE[name]
    net = Network()
    with net_guard(net):
        write().mark_output("out")
    before = str(net)
    manager = manager_of(name)
    assert not manager.rewrite(net).fired
    assert str(net) == before
    layer = net.get_layer_by_name(layer_name)
    assert layer is not None, before
    assert reason in manager.explain(layer)[0].reason


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda: fragments(scale=(4,)), "the scale"),
        (lambda: fragments(mask=(2, 3, 4, 4), fill=-5.0), "which does not make their weights 0"),
        (
            lambda: F.matmul(F.softmax(F.matmul(given("a", 3, 4), given("b", 4, 3))), given("c", 3, 2)),
            "2 dim",
        ),
        (
            lambda: F.matmul(
                F.softmax(F.matmul(given("a", 2, 1, 3, 4), given("b", 2, 5, 4, 3))), given("c", 2, 5, 3, 2)
            ),
            "batch and heads differ",
        ),
    ],
)
def test_attention_refuses_what_it_cannot_say(write: Callable[[], Tensor], reason: str) -> None:
    net = Network()
    with net_guard(net):
        write().mark_output("out")
    manager = manager_of("attention")
    assert not manager.rewrite(net).fired
    last = list(net.get_layers())[-1]
    assert reason in manager.explain(last)[0].reason


def test_any_order_of_k_keeps_its_numbers() -> None:
    """Whatever permutation makes the transpose of k, the attention made of it answers the same."""

    def turned(rng: np.random.Generator) -> Network:
        net = Network()
        with net_guard(net):
            q, k, v = (given(name, 3, 3, 3, 3) for name in "qkv")
            order = [int(i) for i in rng.permutation(4)]
            scores = F.matmul(q, F.transpose(k, order))
            F.matmul(F.softmax(scores * 0.5), v).mark_output("y")
        return net

    assert check_pattern(FUSIONS["attention"].pattern, turned, trials=24, kinds=FINITE).fired == 24


@pytest.mark.parametrize("name", [name for name, fusion in FUSIONS.items() if fusion.finite_only])
def test_what_differs_for_nan_is_found_and_not_applied_by_itself(name: str, tmp_path: Path) -> None:
    fusion = FUSIONS[name]
    with pytest.raises(RewriteError, match="for special values"):
        check_pattern(fusion.pattern, fusion.sample, trials=40, kinds=("special",))
    net = fusion.sample(np.random.default_rng(0))
    log = apply(net, engine=ORT, measure=False, cache=tmp_path / "known.json")
    assert "NaN and infinities" in log.skipped[name]
