"""Compiled, models with quantized weights answer as they do eagerly, on every engine that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantized_checkpoints import LAYOUTS, qwen, write

import intarsia

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
def test_tokens_and_a_saved_decoder(name: str, tmp_path: Path) -> None:
    model = _loaded(tmp_path / "folder", name, num_hidden_layers=1)
    ids = torch.randint(0, 128, (1, 6), generator=torch.Generator().manual_seed(0))
    right = model.generate(ids, max_new_tokens=8, do_sample=False)
    fast = intarsia.compile_generation(model, max_cache_len=32, engines=["onnxruntime"])
    assert torch.equal(fast.generate(ids, max_new_tokens=8, do_sample=False), right)
