"""Compiled, models with quantized weights answer as they do eagerly, on every engine that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantized_checkpoints import LAYOUTS, qwen, write

import intarsia
from intarsia import generation

pytest.importorskip("transformers")

ENGINES = ["onnxruntime", "openvino", "pytorch"]
# Of each kind of layout the one with most to lose: groups, zero points, an order.
KINDS = ["int4-groups-zeros", "int8-packed", "int8-channels-zeros", "float8-channels", "awq", "gptq"]
KINDS += ["gptq-act-order"]


def _loaded(folder: Path, name: str, **changes: Any) -> Any:
    write(folder, qwen(**changes), LAYOUTS[name])
    return intarsia.load_pretrained(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layers(name: str, engine: str, tmp_path: Path) -> None:
    layers = _loaded(tmp_path, name, num_hidden_layers=1).model.layers[0].mlp
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    compiled = intarsia.compile(layers, (x,), engines=[engine], min_block_size=1, fallback="error")
    assert engine in compiled.plan.engines
    with torch.no_grad():
        answer = layers(x)
        difference = (compiled(x) - answer).abs().max() / answer.abs().max()
    # A scale that is off in its last bit rounds a value at the middle of two integers to the other one:
    # a step of 1/127 in one of 64 inputs.
    assert difference < (1 / 127 if LAYOUTS[name].activations else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [*ENGINES, "inductor"])
@pytest.mark.parametrize("name", KINDS)
def test_logits(name: str, engine: str, tmp_path: Path) -> None:
    model = _loaded(tmp_path, name, num_hidden_layers=1)
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    call = {"input_ids": ids, "attention_mask": mask}
    compiled = intarsia.compile(model, (), call, engines=[engine], min_block_size=1, fallback="error")
    assert engine in compiled.plan.engines
    with torch.no_grad():
        torch.testing.assert_close(compiled(**call).logits, model(**call).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4-groups-zeros", "awq", "gptq-act-order"])
def test_tokens_of_a_decoder_that_was_saved(name: str, tmp_path: Path) -> None:
    model = _loaded(tmp_path / "folder", name, num_hidden_layers=1)
    ids = torch.randint(0, 128, (1, 6), generator=torch.Generator().manual_seed(0))
    call = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    right = model.generate(ids, **call)
    with intarsia.compile_generation(model, max_length=32, engines=["onnxruntime"]) as fast:
        assert torch.equal(model.generate(ids, **call), right)
        generation.save(fast, tmp_path / "decoder.generation")
    again = intarsia.load_pretrained(tmp_path / "folder", dtype=torch.float32)
    with generation.load(tmp_path / "decoder.generation", again):
        assert torch.equal(again.generate(ids, **call), right)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_folder_of_torchao(config: str, tmp_path: Path) -> None:
    """transformers loads these; the weights that it makes require gradients."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    qwen(num_hidden_layers=1).save_pretrained(tmp_path / "float")
    settings = TorchAoConfig(getattr(torchao, config)())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=settings)
    reference.save_pretrained(tmp_path / "quantized")
    model = intarsia.load_pretrained(tmp_path / "quantized")
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    compiled = intarsia.compile(model, (ids,), engines=["onnxruntime"], min_block_size=1, fallback="error")
    assert "onnxruntime" in compiled.plan.engines
    with torch.no_grad():
        right = reference(ids).logits
        torch.testing.assert_close(model(ids).logits, right)
        torch.testing.assert_close(compiled(ids).logits, right, rtol=1e-4, atol=1e-5)
