"""A checkpoint that does not fit its layout is refused in one sentence, with the tensor and the values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantized_checkpoints import LAYOUTS, llama, save, write

import intarsia
from intarsia.errors import InputError

pytest.importorskip("transformers")

UP = "model.layers.1.mlp.up_proj"
LAYER = "a layer of 64 inputs, 96 outputs, 4 bits in groups of 32"
LAYER_OF_8 = "a layer of 64 inputs, 96 outputs, 8 bits in groups of 64"
Tensors = dict[str, torch.Tensor]


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.{name}"] = change(tensors[f"{UP}.{name}"]).contiguous()

    return edit


def _without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value})


TENSORS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "scales of too few groups": (
        "int4-groups",
        _changed("weight_scale", lambda scale: scale[:, :1]),
        f"{UP}.weight_scale is float32 [96, 1]; {LAYER} needs float32 [96, 2]",
    ),
    "scales of too few outputs": (
        "awq",
        _changed("scales", lambda scale: scale[:, :88]),
        f"{UP}.scales is float16 [2, 88]; {LAYER} needs float32 [2, 96]",
    ),
    "zero points of too few groups": (
        "gptq-zeros",
        _changed("qzeros", lambda zeros: zeros[:1]),
        f"{UP}.qzeros is int32 [1, 12]; {LAYER} needs int32 [2, 12]",
    ),
    "weights of too few inputs": (
        "int4-groups",
        _changed("weight_packed", lambda packed: packed[:, :7]),
        f"{UP}.weight_packed is int32 [96, 7]; ",
    ),
    "weights in another dtype": (
        "int4-groups",
        _changed("weight_packed", lambda packed: packed.to(torch.int64)),
        f"{UP}.weight_packed is int64 [96, 8]; ",
    ),
    "weights of float8 in int8": (
        "float8-channels",
        _changed("weight", lambda weight: weight.view(torch.int8)),
        f"{UP}.weight is int8 [96, 64]; {LAYER_OF_8} needs float8_e4m3fn [96, 64]",
    ),
    "scales that are integers": (
        "int8-channels",
        _changed("weight_scale", lambda scale: scale.int()),
        f"{UP}.weight_scale is int32 [96, 1]; ",
    ),
    "no scales": (
        "int4-groups",
        _without(f"{UP}.weight_scale"),
        f"{UP}.weight_scale is missing; {LAYER} needs float32 [96, 2]",
    ),
    "no zero points": ("awq", _without(f"{UP}.qzeros"), f"{UP}.qzeros is missing; "),
    "no order": ("gptq-act-order", _without(f"{UP}.g_idx"), f"{UP}.g_idx is missing; "),
    "no weight": (
        "gptq",
        _without(f"{UP}.qweight"),
        f"has no tensor {UP}.weight, which LlamaForCausalLM needs",
    ),
    "no norm": (
        "awq",
        _without("model.norm.weight"),
        "has no tensor model.norm.weight, which LlamaForCausalLM",
    ),
    "an embedding of another size": (
        "awq",
        _with("model.embed_tokens.weight", torch.zeros(100, 64)),
        "model.embed_tokens.weight is float32 [100, 64]; LlamaForCausalLM needs float32 [128, 64]",
    ),
    "an order that names a group too many": (
        "gptq-act-order",
        _changed("g_idx", lambda index: index + 1),
        "up_proj.g_idx names group 2, and there are 2 groups",
    ),
    "a tensor that the layout does not have": (
        "int4-groups",
        _with(f"{UP}.weight_zero_point", torch.zeros(12, 2, dtype=torch.int32)),
        f"{UP}.weight_zero_point is not known to {LAYER}",
    ),
    "a quantized embedding": (
        "int4-groups",
        _with("model.embed_tokens.weight_packed", torch.zeros(128, 8, dtype=torch.int32)),
        "model.embed_tokens.weight_packed is quantized; that is read for nn.Linear only, not for Embedding",
    ),
    "a layer that the model does not have": (
        "awq",
        _with("model.layers.2.mlp.up_proj.qweight", torch.zeros(64, 12, dtype=torch.int32)),
        "model.layers.2.mlp.up_proj.qweight is for a layer that LlamaForCausalLM does not have",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    name, edit, sentence = TENSORS[case]
    write(tmp_path, llama(), LAYOUTS[name])
    tensors = _tensors(tmp_path)
    edit(tensors)
    save(tmp_path, tensors)
    _refused(tmp_path, sentence)


Edit = Callable[[dict[str, Any]], Any]


def _weights(**changes: Any) -> Edit:
    return lambda settings: settings["config_groups"]["group_0"]["weights"].update(changes)


SETTINGS: dict[str, tuple[str, Edit, str]] = {
    "groups that do not divide": (
        "int4-groups",
        _weights(group_size=48),
        "model.layers.0.mlp.gate_proj.weight_packed: groups of 48 do not divide its 64 inputs",
    ),
    "groups of nothing": (
        "gptq",
        lambda s: s.update(group_size=0),
        "group_size 0 is not a valid number of inputs",
    ),
    "a group size in words": (
        "awq",
        lambda s: s.update(group_size="all"),
        "group_size 'all' is not a valid number of",
    ),
    "another number of bits": (
        "gptq",
        lambda s: s.update(bits=8),
        "q_proj.qweight is int32 [8, 64]; a layer of 64 inputs, 64 outputs, 8 bits in groups of 32",
    ),
    "bits that nobody has": ("gptq", lambda s: s.update(bits=5), "GPTQ in 5 bits is not read here"),
    "another method": (
        "awq",
        lambda s: s.update(quant_method="best"),
        "quant_method 'best' is not read here",
    ),
    "another version of AWQ": (
        "awq",
        lambda s: s.update(version="gemv"),
        "AWQ's version 'gemv' in 4 bits is not read here, only 'gemm' in 4",
    ),
    "another format of GPTQ": (
        "gptq",
        lambda s: s.update(checkpoint_format="marlin"),
        "checkpoint_format 'marlin' of GPTQ is not read here, only 'gptq' and 'gptq_v2'",
    ),
    "a layer that should not be quantized": (
        "int4-groups",
        lambda s: s.update(ignore=[UP]),
        f"{UP}.weight_packed is quantized, but quantization_config leaves {UP} as it is",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str, tmp_path: Path) -> None:
    name, edit, sentence = SETTINGS[case]
    write(tmp_path, llama(), LAYOUTS[name])
    config = json.loads((tmp_path / "config.json").read_text())
    edit(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(tmp_path, sentence)


# What compressed-tensors reads, where it is installed, and would not keep packed.
UNREAD: dict[str, tuple[Edit, str]] = {
    "another format": (
        lambda s: s["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"),
        "format 'mxfp4-pack-quantized' of int weights in 4 bits is not read here",
    ),
    "blocks": (_weights(strategy="block"), "weights with strategy 'block' are not read here"),
    "rounded keys": (
        lambda s: s.update(kv_cache_scheme={"num_bits": 8, "type": "float"}),
        "kv_cache_scheme {'num_bits': 8, 'type': 'float'} is not read here",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_left_to_the_library(case: str) -> None:
    from tests.quantized_checkpoints import quantization_config

    from intarsia.checkpoint.layouts import UnknownLayout, scheme_of

    edit, sentence = UNREAD[case]
    settings = quantization_config(LAYOUTS["int4-groups"])
    edit(settings)
    with pytest.raises(UnknownLayout, match=re.escape(sentence)):
        scheme_of(settings)


def test_other_bits_of_compressed_tensors_are_left_to_it(tmp_path: Path) -> None:
    """transformers loads what has no layer here, where the package is installed."""
    settings = replace(LAYOUTS["int8-dynamic"], activations="static")
    reference = write(tmp_path, llama(), settings)
    config = json.loads((tmp_path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["num_bits"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    pytest.importorskip("compressed_tensors")
    model = intarsia.load_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-5, atol=1e-5)


def test_no_safetensors(tmp_path: Path) -> None:
    write(tmp_path, llama(), LAYOUTS["gptq"])
    torch.save(_tensors(tmp_path), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    _refused(tmp_path, "pytorch_model.bin is not a safetensors file")


def test_no_folder(tmp_path: Path) -> None:
    _refused(tmp_path / "none", "none has no config.json, so it is not a Hugging Face folder")


def _tensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    tensors: Tensors = load_file(folder / "model.safetensors")
    return {name: value.clone() for name, value in tensors.items()}


def _refused(folder: Path, sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        intarsia.load_pretrained(folder)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
