"""Models loaded with quantized weights answer as the float models that these weights stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantized_checkpoints import LAYOUTS, llama, quantize, qwen, write
from torch import nn

import intarsia
from intarsia import quantized
from intarsia.checkpoint.linear import QuantizedLinear

pytest.importorskip("transformers")

DECODERS = {"llama": llama, "qwen": qwen}
IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))


def _logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
        return logits


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_dequantized_weights(name: str, decoder: str, tmp_path: Path) -> None:
    reference = write(tmp_path, DECODERS[decoder](), LAYOUTS[name])
    model = intarsia.load_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-6, atol=1e-6)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_with_some_rows_at_a_time_are_those_of_the_whole_weight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, llama(), LAYOUTS[name])
    model = intarsia.load_pretrained(tmp_path, dtype=torch.float32)
    expected = _logits(model)
    monkeypatch.setattr(quantized, "_AT_A_TIME", 1)
    monkeypatch.setattr(quantized, "_FEWEST_ROWS", 16)
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-6)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert all(torch.equal(layer.dequantized(slice(16, 48)), layer.dequantized()[16:48]) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int4-groups-zeros", "float8-channels", "awq", "gptq-act-order"])
def test_weights_are_dequantized_in_the_dtype_of_the_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write(tmp_path, llama().to(dtype), LAYOUTS[name])
    model = intarsia.load_pretrained(tmp_path)
    layer = model.model.layers[1].mlp.down_proj
    scale = getattr(layer, "weight_scale", None)
    assert (layer.scales if scale is None else scale).dtype == dtype
    exact = intarsia.load_pretrained(tmp_path, dtype=torch.float32).model.layers[1].mlp.down_proj
    torch.testing.assert_close(layer.dequantized().float(), exact.dequantized(), rtol=1e-2, atol=1e-3)
    assert _logits(model).dtype == dtype


@pytest.mark.parametrize("name", ["int4-groups-zeros", "int8-packed", "int8-dynamic", "float8-channels"])
def test_logits_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    write(tmp_path, qwen(), LAYOUTS[name])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = intarsia.load_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(_logits(ours), _logits(theirs), rtol=1e-6, atol=1e-6)
    # What they hold by then is dense: `load_pretrained` does not leave these folders to them for that.
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "channel", "type": "float"},
    ],
    ids=["int4", "int8", "float8"],
)
def test_a_folder_that_compressed_tensors_wrote(arguments: dict[str, Any], tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors import quantization
    from compressed_tensors.quantization.utils import calculate_qparams

    model = llama()
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "quantization_scheme"):
            parts = module.weight.detach().unflatten(1, (-1, arguments.get("group_size", module.in_features)))
            scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), weights)
            module.weight_scale.data = scale
            module.weight_zero_point.data = zero
            module.quantization_status = quantization.QuantizationStatus.FROZEN
    right = _logits(model)  # of weights that are rounded at the call
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    torch.testing.assert_close(_logits(intarsia.load_pretrained(tmp_path)), right, rtol=1e-6, atol=1e-6)


def test_buffers_are_the_tensors_of_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path, llama(), LAYOUTS["gptq-act-order"])
    stored = load_file(tmp_path / "model.safetensors")
    held = intarsia.load_pretrained(tmp_path).state_dict()
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name].to(value.dtype), value) for name, value in stored.items())


def test_files_in_shards(tmp_path: Path) -> None:
    reference = write(tmp_path, llama(), LAYOUTS["awq"], shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    torch.testing.assert_close(_logits(intarsia.load_pretrained(tmp_path)), _logits(reference))


def test_layers_that_are_left_as_they_are(tmp_path: Path) -> None:
    left = ["lm_head", "model.layers.0.mlp.up_proj"]
    reference = write(tmp_path, llama(), LAYOUTS["int4-groups"], ignore=left)
    model = intarsia.load_pretrained(tmp_path)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert isinstance(model.model.layers[1].mlp.up_proj, QuantizedLinear)
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-6, atol=1e-6)


def test_a_quantized_head(tmp_path: Path) -> None:
    reference = write(tmp_path, llama(), LAYOUTS["gptq"], ignore=())
    model = intarsia.load_pretrained(tmp_path)
    assert isinstance(model.lm_head, QuantizedLinear)
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-6, atol=1e-6)


def test_layers_with_other_bits(tmp_path: Path) -> None:
    """GPTQ names them by a pattern under `dynamic`, compressed-tensors by a group of their own."""
    for name, wide in ("gptq", "gptq-int8"), ("int4-groups", "int8-packed"):
        folder = tmp_path / name
        reference = write(folder, llama(), LAYOUTS[name])
        path = "model.layers.1.self_attn.q_proj"
        tensors, dense = quantize(LAYOUTS[wide], llama().get_submodule(path).weight.detach())
        reference.get_submodule(path).weight = nn.Parameter(dense)
        _rewrite(folder, {f"{path}.{suffix}": value for suffix, value in tensors.items()})
        if name == "gptq":
            _configure(folder, dynamic={r"+:.*layers\.1.*q_proj": {"bits": 8}})
        else:
            groups = _settings(folder)["config_groups"]
            weights = groups["group_0"]["weights"] | {
                "num_bits": 8,
                "strategy": "channel",
                "group_size": None,
            }
            groups["group_1"] = groups["group_0"] | {"targets": [f"re:{path}"], "weights": weights}
            _configure(folder, config_groups=groups)
        model = intarsia.load_pretrained(folder)
        assert model.get_submodule(path).bits == 8
        torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-6, atol=1e-6)


def test_gptq_groups_that_do_not_divide(tmp_path: Path) -> None:
    """The last group of GPTQ may be shorter: 64 inputs in groups of 48."""
    from dataclasses import replace

    reference = write(tmp_path, llama(), replace(LAYOUTS["gptq-zeros"], group=48))
    torch.testing.assert_close(_logits(intarsia.load_pretrained(tmp_path)), _logits(reference))


def test_a_folder_that_is_not_quantized(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(_logits(intarsia.load_pretrained(tmp_path)), _logits(model))


def test_a_model_saved_again(tmp_path: Path) -> None:
    write(tmp_path / "first", llama(), LAYOUTS["int4-groups-zeros"])
    model = intarsia.load_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    assert torch.equal(_logits(intarsia.load_pretrained(tmp_path / "second")), _logits(model))


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return settings


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def _rewrite(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    paths = {name.rpartition(".")[0] for name in changes}
    kept = {name: value for name, value in load_file(file).items() if name.rpartition(".")[0] not in paths}
    save_file(kept | changes, file, {"format": "pt"})
