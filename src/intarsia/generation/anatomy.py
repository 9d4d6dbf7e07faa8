"""What generation has to know of a model: keys and values of its layers, windows, its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from intarsia.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"  # names that transformers gives masks of layers


@dataclass(frozen=True)
class Anatomy:
    """A decoder as one forward of it shows it."""

    heads: tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # (heads, size) of keys and values, by layer
    dtype: torch.dtype
    mask_dtype: torch.dtype  # booleans, or numbers that are added to scores
    device: torch.device
    windows: tuple[tuple[str, int | None], ...]  # each kind of layer there is, and how far it looks back
    keeps: bool  # whether forward takes `logits_to_keep`
    result: Callable[..., Any]  # the class of what forward returns

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in self.windows)

    @property
    def slides(self) -> bool:
        return any(window is not None for _, window in self.windows)

    def empty(self, rows: int, room: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer, zeros, for so many tokens."""

        def zeros(heads: int, size: int) -> torch.Tensor:
            return torch.zeros(rows, heads, room, size, dtype=self.dtype, device=self.device)

        return [(zeros(*keys), zeros(*values)) for keys, values in self.heads]


def anatomy_of(model: Any, max_length: int) -> Anatomy:
    """Look at a model by running it on two tokens; InputError where it is none that can be served."""
    if not isinstance(model, nn.Module) or not hasattr(model, "generate") or not hasattr(model, "config"):
        raise InputError(
            f"compile_generation takes a transformers model that generates, not a {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{type(model).__name__} is an encoder-decoder; only decoders are served yet")
    if model.training:
        raise InputError(f"{type(model).__name__} is in training; call eval() first")
    own: Any = model
    config = own.config.get_text_config(decoder=True)
    takes = inspect.signature(model.forward).parameters
    missing = [
        name
        for name in ("input_ids", "attention_mask", "position_ids", "past_key_values")
        if name not in takes
    ]
    if missing:
        raise InputError(f"forward of {type(model).__name__} takes no {missing[0]}")
    attention = getattr(config, "_attn_implementation", None)  # transformers has no public name for it
    if attention not in ("sdpa", "eager"):
        raise InputError(
            f"{type(model).__name__} runs the attention {attention!r}; served are 'sdpa' and 'eager'"
            " (model.set_attn_implementation)"
        )
    _check_positions(own, config, max_length)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=own.device)
        made = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True)
    strange = {type(layer).__name__ for layer in cache.layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    if strange or made.past_key_values is not cache:
        raise InputError(f"the cache of {type(model).__name__} has layers of kind {', '.join(strange)}")
    windows: dict[str, int | None] = {}
    for layer in cache.layers:
        reach = getattr(layer, "sliding_window", None)
        windows[FULL if reach is None else SLIDING] = None if reach is None or reach >= max_length else reach
    if set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}:
        raise InputError(f"{type(model).__name__} has layers of kinds {sorted(set(config.layer_types))}")
    if not any(windows.values()):
        windows = {FULL: None}  # no window is shorter than all there can be
    return Anatomy(
        heads=tuple((_heads(layer.keys), _heads(layer.values)) for layer in cache.layers),
        dtype=cache.layers[0].keys.dtype,
        mask_dtype=torch.bool if attention == "sdpa" else cache.layers[0].keys.dtype,
        device=cache.layers[0].keys.device,
        windows=tuple(windows.items()),
        keeps="logits_to_keep" in takes,
        result=type(made),
    )


def _check_positions(model: Any, config: Any, max_length: int) -> None:
    """InputError where the model has no such position, or where positions change with the length."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in rope:
            raise InputError(
                f"{type(model).__name__} has rotary embeddings of kind {kind!r}, which change with the length"
            )
    limit = getattr(config, "max_position_embeddings", None)
    if model.device.type != "cpu" or limit is None or max_length <= limit:
        return  # a GPU does not live through an index out of range
    last = torch.full((1, 1), max_length - 1)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros_like(last), position_ids=last, use_cache=False)
    except IndexError as error:
        raise InputError(f"max_length is {max_length}, and {type(model).__name__} ends at {limit}") from error


def _heads(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.shape[1]), int(tensor.shape[3])
