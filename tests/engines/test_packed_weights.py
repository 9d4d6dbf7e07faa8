"""Models with quantized weights: their products are recognised, stay in few bits, and answer as the model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.layouts import LAYOUTS, Awq, Compressed, Gptq, Lookup
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import intarsia
from intarsia.capture.export import capture
from intarsia.checkpoint.linear import PackedLinear
from intarsia.convert import interpreter, registry
from intarsia.lower import Lowered, lower
from intarsia.quantized import EMBEDDING, LINEAR

ENGINES = ["onnxruntime", "openvino", "pytorch"]
torchao = pytest.importorskip("torchao.quantization")


class _LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that any operator returned."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(arg is result for arg in args):
            self.size = max(self.size, result.nbytes)
        return result


def _lowered(model: nn.Module, *args: torch.Tensor) -> Lowered:
    return lower(capture(model, args, {}), has_converter=registry.__contains__)


def _targets(model: nn.Module, *args: torch.Tensor) -> list[object]:
    return [node.target for node in _lowered(model, *args).module.graph.nodes if node.op == "call_function"]


def _torchao(config: object, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Linear(96, 64)).eval().to(dtype)
    torchao.quantize_(model, config)
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_answers_as_the_model_on_every_engine(layout: str, engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LAYOUTS[layout](128, 192), nn.GELU(), LAYOUTS[layout](192, 64)).eval()
    x = torch.randn(3, 5, 128)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert fast.plan.engines == (engine,)
    assert f"weights in few bits on {engine}: 2 in {8 if '8' in layout else 4} bits" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bits", [4, 8])
def test_torchao_weights_stay_in_their_bits(bits: int, engine: str) -> None:
    torch.manual_seed(0)
    dtype = {4: torch.int4, 8: torch.int8}[bits]
    model = _torchao(torchao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=torchao.PerGroup(32)))
    x = torch.randn(4, 128)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert fast.plan.engines == (engine,)
    assert LINEAR in _targets(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_int8_weights_of_torchao_whose_scales_follow_the_product(engine: str) -> None:
    torch.manual_seed(0)
    model = _torchao(torchao.Int8WeightOnlyConfig())
    x = torch.randn(4, 128)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert LINEAR in _targets(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype: torch.dtype, engine: str) -> None:
    torch.manual_seed(0)
    model = Gptq(128, 64, 32, act_order=True, dtype=dtype).eval()
    x = torch.randn(4, 128, dtype=dtype)
    assert LINEAR in _targets(model, x)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(fast(x), model(x), rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_tied_heads(tied: bool, engine: str) -> None:
    torch.manual_seed(0)
    model = Lookup(40, 64, 32, tied).eval()
    indices = torch.tensor([[0, 3, 39], [7, 7, 1]])
    targets = _targets(model, indices)
    assert EMBEDDING in targets and (LINEAR in targets) == tied
    fast = intarsia.compile(model, (indices,), engines=[engine], min_block_size=1)
    assert fast.plan.engines == (engine,)
    torch.testing.assert_close(fast(indices), model(indices), rtol=2e-5, atol=2e-5)
    with pytest.raises(IndexError):
        model(torch.tensor([[0, 40, 1], [0, 0, 0]]))
    with pytest.raises(IndexError):
        fast(torch.tensor([[0, 40, 1], [0, 0, 0]]))


@pytest.mark.parametrize("engine", ENGINES)
def test_lengths_that_vary(engine: str) -> None:
    torch.manual_seed(0)
    model = Awq(128, 64, 32).eval()
    length = torch.export.Dim("length", min=1, max=64)
    fast = intarsia.compile(
        model, (torch.randn(2, 9, 128),), dynamic_shapes=({1: length},), engines=[engine], min_block_size=1
    )
    for size in (1, 4, 64):
        x = torch.randn(2, size, 128)
        torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("columns", "group"), [(48, 48), (100, 100), (72, 72), (768, 384), (20, 20)])
def test_columns_of_any_number(columns: int, group: int, engine: str) -> None:
    torch.manual_seed(0)
    for bits in (4, 8) if columns % 8 == 0 else (8,):
        model, x = Compressed(columns, 24, group, bits).eval(), torch.randn(3, columns)
        assert LINEAR in _targets(model, x)
        fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
        torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


def test_nan_and_infinities_come_out_as_the_model_has_them() -> None:
    x = torch.randn(3, 64)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    for engine, model in product(ENGINES, (Awq(64, 32, 32).eval(), Compressed(64, 32, 64, 8).eval())):
        fast = intarsia.compile(model, (torch.randn(3, 64),), engines=[engine], min_block_size=1)
        torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5, equal_nan=True)


class _FloatZeros(Compressed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.integers().unflatten(1, (-1, self.group)).float() - 0.3
        return nn.functional.linear(x, (groups * self.weight_scale[:, :, None]).flatten(1))


def test_a_weight_that_is_not_understood_is_named_in_the_plan() -> None:
    model, x = _FloatZeros(64, 32, 32, 4).eval(), torch.randn(3, 64)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    reason = "linear: it scales numbers that are not integers"
    assert f"these weights are not stored in few bits: {reason}" in fast.notes
    assert "in few bits on" not in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


def test_float_weights_are_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).eval(), torch.randn(3, 32)
    lowered = _lowered(model, x)
    assert LINEAR not in [node.target for node in lowered.module.graph.nodes]
    assert lowered.notes == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_float8_weights_stay_packed_in_pytorch(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = _torchao(torchao.Float8WeightOnlyConfig()), torch.randn(4, 128)
    assert _targets(model, x).count(LINEAR) == 2
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    assert "weights in few bits on pytorch: 2 in 8 bits" in str(fast.plan)
    if engine != "pytorch":
        reason = "a weight of torch.float8_e4m3fn would be held as float32: there is no product that reads it"
        assert f"quantized_linear.default x2: {reason}" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)
    intarsia.save(fast, tmp_path / "model.intarsia")
    torch.testing.assert_close(intarsia.load(tmp_path / "model.intarsia")(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_and_new_weights(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = (
        nn.Sequential(Gptq(128, 64, 32, True), Compressed(64, 32, 64, 8)).eval() for _ in range(2)
    )
    x = torch.randn(3, 128)
    fast = intarsia.compile(model, (x,), engines=[engine], min_block_size=1)
    intarsia.save(fast, tmp_path / "model.intarsia")
    again = intarsia.load(tmp_path / "model.intarsia")
    assert f"weights in few bits on {engine}: 1 in 4 bits, 1 in 8 bits" in str(again.plan)
    torch.testing.assert_close(again(x), model(x), rtol=2e-5, atol=2e-5)
    for module in (fast, again):
        module.refit(other)
        torch.testing.assert_close(module(x), other(x), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_inductor_reads_them_in_their_bits() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Awq(128, 64, 32), Compressed(64, 32, 64, 8)).eval(), torch.randn(3, 128)
    fast = intarsia.compile(model, (x,), engines=["inductor"], min_block_size=1)
    assert "weights in few bits on inductor: 1 in 4 bits, 1 in 8 bits" in str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_decoder_generates_the_same_tokens(engine: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, **sizes)).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Awq(child.in_features, child.out_features, 32))
    ids = torch.randint(0, 96, (1, 7))
    right = model.generate(ids, max_new_tokens=8, do_sample=False)
    fast = intarsia.compile_generation(model, max_length=32, engines=[engine])
    assert torch.equal(fast.generate(ids, max_new_tokens=8, do_sample=False), right)


@pytest.mark.parametrize("bits", [4, 8])
def test_within_a_tolerance_activations_before_weights_in_few_bits_are_rounded(bits: int) -> None:
    torch.manual_seed(0)
    model, x = Compressed(256, 128, 128, bits).eval(), torch.randn(4, 256)
    engine = f"onnxruntime-int{bits}-weights"
    fast = intarsia.compile(
        model, (x,), engines=[engine], tolerance=0.1, min_block_size=1, partition="dependency"
    )
    assert fast.plan.engines == (engine,)
    error = (fast(x) - model(x)).abs().max() / model(x).abs().max()
    assert 1e-4 < error < 0.03  # of 8 bits; products of floats are off by 1e-6
    x[0, 3] = torch.inf
    torch.testing.assert_close(fast(x), model(x), rtol=2e-5, atol=2e-5, equal_nan=True)


def test_products_in_four_bits_have_no_guards() -> None:
    guards = []
    for bits in (4, 8):
        fast = intarsia.compile(
            Compressed(128, 64, 64, bits).eval(),
            (torch.randn(3, 128),),
            engines=["onnxruntime"],
            min_block_size=1,
        )
        guards.append(fast.inlay.steps[0].program.program.guards)
    assert not guards[0]
    assert guards[1]


def test_an_engine_is_asked_once_about_products_of_one_shape() -> None:
    """Trial conversions are remembered, with their weights: one each took as much memory as the model."""
    model = nn.Sequential(*(Compressed(208, 208, 16, 4) for _ in range(6))).eval()
    asked = {key for key in interpreter._memo if key[1][0] is LINEAR}
    fast = intarsia.compile(model, (torch.randn(2, 208),), engines=["onnxruntime"], min_block_size=1)
    assert "6 in 4 bits" in str(fast.plan)
    assert len({key for key in interpreter._memo if key[1][0] is LINEAR} - asked) == 1


def test_a_large_weight_is_never_dense_in_pytorch() -> None:
    """Of 16 MB of floats, 1 MB at a time exists, in the model of a checkpoint and in its graph."""
    torch.manual_seed(0)
    names = ("weight_packed", "weight_scale")
    layer = PackedLinear(nn.Linear(2048, 2048, bias=False), 4, 128, names, True, False).eval()
    layer.weight_packed.copy_(torch.randint(-(2**31), 2**31, layer.weight_packed.shape, dtype=torch.int32))
    layer.weight_scale.uniform_(0.0, 1e-3)
    x = torch.randn(3, 2048)
    expected = nn.functional.linear(x, layer.dequantized())
    graph = _lowered(layer, x).module
    assert any(node.target is LINEAR for node in graph.graph.nodes)
    for run in (layer, lambda x: graph(x)[0]):
        with torch.no_grad(), _LargestResult() as largest:
            answer = run(x)
        assert largest.size <= 1 << 21
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)
