"""Small checkpoints in the published layouts of quantized weights, for the tests and the fuzzer.

`LAYOUTS` has the layouts by name. `quantize` packs one weight; `write` writes a folder of Hugging Face and
returns the float model whose weights are the dequantized ones, which answers what the checkpoint's does.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Config = dict[str, Any]
_FLOAT8_MOST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores the weight of a linear layer."""

    method: str  # `quant_method` of the configuration
    format: str  # of compressed-tensors, or `checkpoint_format` of GPTQ
    bits: int = 4
    group: int | None = 32  # inputs that share a scale; None: a scale an output; 0: one scale
    symmetric: bool = True
    act_order: bool = False  # the groups of inputs are named by `g_idx`
    activations: str | None = None  # inputs are rounded too: by a scale a token, or by one that is stored


LAYOUTS = {
    "int4-groups": Layout("compressed-tensors", "pack-quantized"),
    "int4-groups-zeros": Layout("compressed-tensors", "pack-quantized", symmetric=False),
    "int4-channels": Layout("compressed-tensors", "pack-quantized", group=None),
    "int4-channels-zeros": Layout("compressed-tensors", "pack-quantized", group=None, symmetric=False),
    "int4-tensor": Layout("compressed-tensors", "pack-quantized", group=0),
    "int4-act-order": Layout("compressed-tensors", "pack-quantized", act_order=True),
    "int8-packed": Layout("compressed-tensors", "pack-quantized", bits=8, group=None),
    "int8-packed-zeros": Layout("compressed-tensors", "pack-quantized", bits=8, symmetric=False),
    "int8-channels": Layout("compressed-tensors", "naive-quantized", bits=8, group=None),
    "int8-channels-zeros": Layout(
        "compressed-tensors", "naive-quantized", bits=8, group=None, symmetric=False
    ),
    "int8-groups": Layout("compressed-tensors", "naive-quantized", bits=8),
    "int8-tensor": Layout("compressed-tensors", "int-quantized", bits=8, group=0),
    "int8-dynamic": Layout("compressed-tensors", "int-quantized", bits=8, group=None, activations="dynamic"),
    "int8-static": Layout("compressed-tensors", "int-quantized", bits=8, group=None, activations="static"),
    "float8-channels": Layout("compressed-tensors", "float-quantized", bits=8, group=None),
    "float8-tensor": Layout("compressed-tensors", "float-quantized", bits=8, group=0),
    "float8-dynamic": Layout(
        "compressed-tensors", "float-quantized", bits=8, group=None, activations="dynamic"
    ),
    "float8-static": Layout("compressed-tensors", "float-quantized", bits=8, group=0, activations="static"),
    "awq": Layout("awq", "gemm", symmetric=False),
    "awq-channels": Layout("awq", "gemm", group=None, symmetric=False),
    "awq-symmetric": Layout("awq", "gemm"),
    "gptq": Layout("gptq", "gptq"),
    "gptq-zeros": Layout("gptq", "gptq", symmetric=False),
    "gptq-channels": Layout("gptq", "gptq", group=None),
    "gptq-act-order": Layout("gptq", "gptq", symmetric=False, act_order=True),
    "gptq-v2": Layout("gptq", "gptq_v2", symmetric=False),
    "gptq-int8": Layout("gptq", "gptq", bits=8),
    "gptq-int2": Layout("gptq", "gptq", bits=2, symmetric=False),
}


def quantize(layout: Layout, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a checkpoint for a weight `(outputs, inputs)`, and the weight they stand for."""
    outputs, inputs = weight.shape
    group = inputs if not layout.group else layout.group
    groups = -(-inputs // group)
    index = torch.arange(inputs, dtype=torch.int32) // group
    if layout.act_order:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    kept = weight.dtype if layout.method == "compressed-tensors" else torch.float16
    numbers, scale, zero = _numbers(layout, weight.float(), index, groups, kept)
    least = torch.zeros((), dtype=zero.dtype) if zero.is_floating_point() else zero[:, index]
    dense = (numbers.float() - least.float()) * scale.float()[:, index]
    scale = scale[:1, 0] if layout.group == 0 else scale
    if layout.method == "compressed-tensors":
        return _compressed(layout, numbers, scale, zero, index), dense
    scale = scale.expand(outputs, -1).t().contiguous()
    if layout.method == "awq":
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        mixed = [part.t().unflatten(1, (-1, 8))[:, :, order].flatten(1) for part in (numbers, zero)]
        zeros = {} if layout.symmetric else {"qzeros": _pack(mixed[1], 4)}
        return {"qweight": _pack(mixed[0], 4), "scales": scale, **zeros}, dense
    stored = zero if layout.format == "gptq_v2" else (zero - 1) & (2**layout.bits - 1)
    tensors = {
        "qweight": _pack(numbers, layout.bits).t().contiguous(),
        "qzeros": _pack(stored.t(), layout.bits),
        "scales": scale,
        "g_idx": index,
    }
    return tensors, dense


def _numbers(
    layout: Layout, weight: Tensor, index: Tensor, groups: int, kept: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The integers of a weight, from 0 on, with the scale and the zero point of each output and group."""
    columns = [weight[:, index == group] for group in range(groups)]
    if layout.group == 0:
        columns = [weight.reshape(1, -1)]
    low = torch.stack([column.amin(1).clamp(max=0) for column in columns], 1)
    high = torch.stack([column.amax(1).clamp(min=0) for column in columns], 1)
    low, high = (bound.expand(weight.shape[0], -1) for bound in (low, high))
    largest = torch.maximum(-low, high)
    if layout.format == "float-quantized":
        scale = (largest / _FLOAT8_MOST).to(kept)
        return (weight / scale.float()[:, index]).to(torch.float8_e4m3fn), scale, torch.zeros(())
    most = 2**layout.bits - 1
    scale = ((2 * largest if layout.symmetric else high - low) / most).to(kept)
    zero = torch.full_like(scale, (most + 1) / 2) if layout.symmetric else (-low / scale.float()).round()
    zero = zero.clamp(0, most).int()
    numbers = (weight / scale.float()[:, index]).round().int() + zero[:, index]
    return numbers.clamp(0, most), scale, zero


def _compressed(
    layout: Layout, numbers: Tensor, scale: Tensor, zero: Tensor, index: Tensor
) -> dict[str, Tensor]:
    half = 2 ** (layout.bits - 1)
    tensors = {"weight_scale": scale.contiguous()}
    if layout.format == "pack-quantized":
        tensors |= {"weight_packed": _pack(numbers, layout.bits), "weight_shape": torch.tensor(numbers.shape)}
    else:
        is_float = numbers.is_floating_point()
        tensors["weight"] = numbers if is_float else (numbers - half).to(torch.int8)
    if not layout.symmetric:
        packed = layout.format == "pack-quantized"
        tensors["weight_zero_point"] = (
            _pack(zero.t(), layout.bits).t().contiguous() if packed else (zero - half).to(torch.int8)
        )
    if layout.act_order:
        tensors["weight_g_idx"] = index
    if layout.activations == "static":
        tensors["input_scale"] = torch.tensor([0.02 if layout.format == "float-quantized" else 0.05])
    return tensors


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Integers of some bits side by side in int32, the first in the lowest bits, along the last dimension."""
    each = 32 // bits
    padded = nn.functional.pad(numbers.long(), (0, -numbers.shape[-1] % each))
    words = (padded.unflatten(-1, (-1, each)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantization_config(layout: Layout, ignore: Sequence[str] = ("lm_head",)) -> Config:
    """What config.json says of the layout."""
    if layout.method == "awq":
        return {
            "quant_method": "awq",
            "bits": layout.bits,
            "group_size": layout.group or -1,
            "zero_point": not layout.symmetric,
            "version": layout.format,
            "modules_to_not_convert": list(ignore),
        }
    if layout.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": layout.bits,
            "group_size": layout.group or -1,
            "desc_act": layout.act_order,
            "sym": layout.symmetric,
            "checkpoint_format": layout.format,
            "lm_head": "lm_head" not in ignore,
        }
    strategy = {None: "channel", 0: "tensor"}.get(layout.group, "group")
    kind = "float" if layout.format == "float-quantized" else "int"
    weights = {
        "num_bits": layout.bits,
        "type": kind,
        "symmetric": layout.symmetric,
        "strategy": strategy,
        "group_size": layout.group or None,
        "dynamic": False,
        "actorder": "group" if layout.act_order else None,
    }
    inputs = None
    if layout.activations is not None:
        dynamic = layout.activations == "dynamic"
        inputs = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "dynamic": dynamic,
            "strategy": "token" if dynamic else "tensor",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": layout.format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": list(ignore),
    }


def write(
    folder: Path, model: Any, layout: Layout, *, ignore: Sequence[str] = ("lm_head",), shards: int = 1
) -> Any:
    """Write a transformers model with quantized linear layers; the float model that answers the same."""
    reference = copy.deepcopy(model).eval()
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    for name, linear in list(reference.named_modules()):
        if not isinstance(linear, nn.Linear) or name in ignore:
            continue
        tensors.pop(f"{name}.weight", None)
        packed, dense = quantize(layout, linear.weight.detach())
        tensors |= {f"{name}.{suffix}": value for suffix, value in packed.items()}
        linear.weight = nn.Parameter(dense.to(linear.weight.dtype))
        if layout.activations is not None:
            linear.register_forward_pre_hook(_rounded_input(layout, packed.get("input_scale")))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = [type(model).__name__]
    written["dtype"] = str(model.dtype).removeprefix("torch.")
    written["quantization_config"] = quantization_config(layout, ignore)
    (folder / "config.json").write_text(json.dumps(written))
    save(folder, tensors, shards)
    return reference


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write tensors as one file of safetensors, or as several with an index."""
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _rounded_input(layout: Layout, static: Tensor | None) -> Any:
    """A hook that rounds the input of a layer, as the layout says, and computes on in float."""
    is_float = layout.format == "float-quantized"
    span = 2 * _FLOAT8_MOST if is_float else 255.0

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (x,) = args
        scale = x.abs().amax(-1, keepdim=True) / (span / 2) if static is None else static
        if is_float:
            units = (x / scale).clamp(-_FLOAT8_MOST, _FLOAT8_MOST).to(torch.float8_e4m3fn).to(x.dtype)
        else:
            units = (x / scale).clamp(-128, 127).round()
        return (units * scale,)

    return hook


def llama(**changes: Any) -> Any:
    """A decoder as Llama, with two layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _drawn(LlamaForCausalLM, LlamaConfig(**_SIZES | changes))


def qwen(**changes: Any) -> Any:
    """A decoder as Qwen 2: biases at the queries, and the head is the embedding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _drawn(Qwen2ForCausalLM, Qwen2Config(**_SIZES | {"tie_word_embeddings": True} | changes))


_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _drawn(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)  # zeros by default, which would hide a lost bias
    return model.eval()
