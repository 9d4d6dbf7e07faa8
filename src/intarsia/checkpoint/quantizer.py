"""A quantizer of transformers that puts Intarsia's quantized layers into models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from intarsia.checkpoint.layouts import UnknownLayout, scheme_of
from intarsia.checkpoint.linear import QuantizedLinear
from intarsia.errors import InputError
from intarsia.plain_tensors import SAFETENSORS_DTYPES

METHOD = "intarsia"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Tensors that only quantized layers have.
_PACKED = ("weight_packed", "weight_scale", "qweight")


@dataclass(frozen=True)
class _Header:
    """The shape and dtype of a tensor in a safetensors file."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@register_quantization_config(METHOD)
class _Config(QuantizationConfigMixin):
    quant_method: Any

    def __init__(self, checkpoint: dict[str, Any], **others: Any) -> None:
        self.quant_method = METHOD
        self.checkpoint = checkpoint  # the `quantization_config` of config.json


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers has no types
    is_trainable = False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True  # the buffers have the names of the checkpoint

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        headers = _headers([Path(file) for file in kwargs["checkpoint_files"]])
        _replace(model, headers, self.quantization_config.checkpoint)
        _check(model, headers)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                module.settle(name)
        model.config.quantization_config = self.quantization_config.checkpoint


def _headers(files: list[Path]) -> dict[str, _Header]:
    headers = {}
    for file in files:
        if file.suffix != ".safetensors":
            raise InputError(
                f"{file} is not a safetensors file; quantized weights are read only from safetensors files"
            )
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is not a dict
                part = tensors.get_slice(name)
                dtype = part.get_dtype()
                headers[name] = _Header(SAFETENSORS_DTYPES.get(dtype, dtype), tuple(part.get_shape()))
    return headers


def _replace(model: nn.Module, headers: Mapping[str, _Header], settings: dict[str, Any]) -> None:
    """Replace the linear layers that are packed in the checkpoint by quantized layers."""
    scheme = scheme_of(settings)
    suffixes: dict[str, set[str]] = defaultdict(set)
    for name in headers:
        module, _, suffix = name.rpartition(".")
        suffixes[module].add(suffix)
    packed = [name for name, names in suffixes.items() if not names.isdisjoint(_PACKED)]
    if not packed:
        raise InputError(f"the checkpoint has no tensor named {' or '.join(_PACKED)}, as quantized ones are")
    modules = dict(model.named_modules())
    for name in packed:
        tensor = f"{name}.{next(suffix for suffix in _PACKED if suffix in suffixes[name])}"
        if (linear := modules.get(name)) is None:
            raise InputError(f"{tensor} is for a layer that {type(model).__name__} does not have")
        if not isinstance(linear, nn.Linear):
            kind = type(linear).__name__
            raise UnknownLayout(f"{tensor} is quantized; that is read for nn.Linear only, not for {kind}")
        if (replacement := scheme(name)) is None:
            raise InputError(f"{tensor} is quantized, but quantization_config leaves {name} as it is")
        try:
            layer = replacement(linear, suffixes[name])
        except InputError as error:
            raise type(error)(f"{tensor}: {error}") from None
        model.set_submodule(name, layer)


def _check(model: nn.Module, headers: Mapping[str, _Header]) -> None:
    """InputError for a tensor whose shape or dtype is not that of its module."""
    for path, module in model.named_modules():
        is_quantized = isinstance(module, QuantizedLinear)
        reader = f"a layer of {module.extra_repr()}" if is_quantized else type(model).__name__
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for suffix, tensor in own.items():
            name, needed = f"{path}.{suffix}", _Header(tensor.dtype, tuple(tensor.shape))
            if (header := headers.get(name)) is not None:
                is_real = tensor.dtype in _FLOATS
                fits = header.dtype in _FLOATS if is_real else header.dtype == tensor.dtype
                if not fits or header.shape != needed.shape:
                    raise InputError(f"{name} is {header}; {reader} needs {needed}")
            elif is_quantized:
                raise InputError(f"{name} is missing; {reader} needs {needed}")
        if is_quantized:
            others = {name for name in headers if name.rpartition(".")[0] == path}
            if others := others - {f"{path}.{suffix}" for suffix in own}:
                raise InputError(f"{min(others)} is not known to {reader}")
