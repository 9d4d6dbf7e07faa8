"""The layout of each linear layer, by the `quantization_config` of a config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from intarsia.checkpoint.linear import (
    AwqLinear,
    GptqLinear,
    PackedLinear,
    PlainLinear,
    QuantizedLinear,
    Rounding,
)
from intarsia.errors import InputError

Settings = Mapping[str, Any]
# From a linear layer, and the names of its tensors in the checkpoint, to the layer that replaces it.
Replacement = Callable[[nn.Linear, Collection[str]], QuantizedLinear]
# From the name of a linear layer to the function above; None if the weight is not quantized.
Scheme = Callable[[str], Replacement | None]


class UnknownLayout(InputError):
    """A quantization without a layer here. The package that wrote the checkpoint may have one."""


def scheme_of(settings: Settings) -> Scheme:
    """The layout of each linear layer, by a `quantization_config`."""
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise UnknownLayout(f"quant_method {method!r} is not read here, only {', '.join(_METHODS)}")
    return _METHODS[method](settings)


def _compressed(settings: Settings) -> Scheme:
    """compressed-tensors: groups of layers, each with its own arguments."""
    for unread in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if settings.get(unread) and settings[unread].get("format") != "dense":
            raise UnknownLayout(f"{unread} {settings[unread]} is not read here")
    if (status := settings.get("quantization_status", "compressed")) != "compressed":
        raise UnknownLayout(f"quantization_status {status!r} is not read here, only 'compressed'")
    replacements: dict[str, Replacement | None] = {}
    for group in (settings.get("config_groups") or {}).values():
        layout = group.get("format") or settings.get("format")
        replacement = _compressed_group(layout, group) if group.get("weights") else None
        replacements |= dict.fromkeys(group.get("targets") or (), replacement)
    ignored = settings.get("ignore") or ()

    def scheme(name: str) -> Replacement | None:
        if any(_matches(name, target) for target in ignored):
            return None
        matching = [target for target in replacements if _matches(name, target)]
        # A name, or a pattern of names, comes before the class of the layer.
        matching.sort(key=lambda target: (target == "Linear", target.startswith("re:")))
        return replacements[matching[0]] if matching else None

    return scheme


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in (name, "Linear")


def _compressed_group(layout: str | None, group: Settings) -> Replacement:
    weights, inputs = group["weights"], group.get("input_activations")
    if group.get("output_activations"):
        raise UnknownLayout(f"output_activations {group['output_activations']} are not read here")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    symmetric, size = weights.get("symmetric", True), weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    if strategy not in ("tensor", "channel", "group"):
        raise UnknownLayout(f"weights with strategy {strategy!r} are not read here")
    one_scale = strategy == "tensor"

    def columns(linear: nn.Linear) -> int:
        return int(size) if strategy == "group" else linear.in_features

    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise InputError(f"quantization_config: group_size {size!r} is not a valid number of inputs")
    if layout == "pack-quantized" and kind == "int" and bits in (2, 4, 8) and inputs is None:
        return lambda linear, names: PackedLinear(linear, bits, columns(linear), names, symmetric, one_scale)
    if layout in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        rounding = _rounding(inputs) if inputs else None
        return lambda linear, names: PlainLinear(
            linear, columns(linear), names, symmetric, one_scale, kind == "float", rounding
        )
    of_inputs = " with rounded inputs" if inputs else ""
    raise UnknownLayout(f"format {layout!r} of {kind} weights in {bits} bits{of_inputs} is not read here")


def _rounding(inputs: Settings) -> Rounding:
    dynamic = inputs.get("dynamic", False)
    strategy = inputs.get("strategy") or "tensor"
    if inputs.get("num_bits", 8) != 8 or strategy not in ("tensor", "token") or dynamic not in (True, False):
        raise UnknownLayout(f"input_activations {dict(inputs)} are not read here")
    is_float = inputs.get("type", "int") == "float"
    return Rounding(is_float, bool(dynamic), strategy == "token", inputs.get("symmetric", True))


def _awq(settings: Settings) -> Scheme:
    bits, size = settings.get("bits", 4), settings.get("group_size", 128)
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm" or bits != 4:
        raise UnknownLayout(f"AWQ's version {version!r} in {bits} bits is not read here, only 'gemm' in 4")
    symmetric = not settings.get("zero_point", True)
    skipped = settings.get("modules_to_not_convert") or ()

    def replacement(linear: nn.Linear, names: Collection[str]) -> QuantizedLinear:
        return AwqLinear(linear, bits, _columns(size, linear), names, symmetric)

    return lambda name: None if any(part in name for part in skipped) else replacement


def _gptq(settings: Settings) -> Scheme:
    layout = settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        layout = "marlin" if settings.get("is_marlin_format") else layout
        raise UnknownLayout(
            f"checkpoint_format {layout!r} of GPTQ is not read here, only 'gptq' and 'gptq_v2'"
        )
    if (word := settings.get("pack_dtype") or "int32") != "int32":
        raise UnknownLayout(f"GPTQ's pack_dtype {word!r} is not read here, only 'int32'")
    changes: Settings = settings.get("dynamic") or {}  # of layers whose names match a pattern

    def scheme(name: str) -> Replacement | None:
        own = dict(settings)
        for pattern, change in changes.items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
                if pattern.startswith("-:"):
                    return None
                own |= change
                break
        bits, size = own.get("bits", 4), own.get("group_size", 128)
        if bits not in (2, 4, 8):
            raise UnknownLayout(f"GPTQ in {bits} bits is not read here, only in 2, 4 and 8 ({name})")
        return lambda linear, names: GptqLinear(
            linear, bits, _columns(size, linear), names, bool(own.get("desc_act")), int(layout == "gptq")
        )

    return scheme


def _columns(size: Any, linear: nn.Linear) -> int:
    if size == -1 or size is None:
        return linear.in_features
    if not isinstance(size, int) or size < 1:
        raise InputError(f"group_size {size!r} is not a valid number of inputs")
    return size


_METHODS: dict[str, Callable[[Settings], Scheme]] = {
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
}
