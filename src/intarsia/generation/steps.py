"""The two modules that are compiled for generation: a prompt, and one token after those in a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from intarsia.generation.attention import attending_to_tokens

Mask = torch.Tensor | Mapping[str, torch.Tensor] | None


class PromptStep(nn.Module):
    """The tokens of a prompt; gives logits of the last one, then keys and values, layer by layer."""

    def __init__(self, model: nn.Module, kinds: Sequence[str], keeps: bool) -> None:
        super().__init__()
        self.model, self.kinds, self.keeps = model, tuple(kinds), keeps

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *masks: torch.Tensor) -> Any:
        cache = DynamicCache()
        logits = _logits(self, input_ids, position_ids, _by_kind(self.kinds, masks), cache)
        return logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


class TokenStep(nn.Module):
    """One token for each row; takes masks and the cache's memory, gives logits and the new slices alone.

    With `in_place`, attention reads the memory where it stands (see `attention.py`); else, for models whose
    attention is their own, the memory and the token are put into one tensor.
    """

    def __init__(self, model: nn.Module, kinds: Sequence[str], keeps: bool, in_place: bool) -> None:
        super().__init__()
        self.model, self.kinds, self.keeps, self.in_place = model, tuple(kinds), keeps, in_place

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        masks, memory = rest[: len(self.kinds)], rest[len(self.kinds) :]
        pairs = zip(memory[::2], memory[1::2], strict=True)
        layers = [_PastLayer(keys, values, self.in_place) for keys, values in pairs]
        cache = Cache(layers=layers)
        with attending_to_tokens(self.model) if self.in_place else nullcontext():
            logits = _logits(self, input_ids, position_ids, _by_kind(self.kinds, masks), cache)
        return logits, *(tensor for layer in layers for tensor in (layer.new_keys, layer.new_values))


class _PastLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """The whole memory of a layer, filled or not, and then the new token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.keys, self.values, self.is_initialized = keys, values, True
        self.new_keys, self.new_values = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.new_keys, self.new_values = key_states, value_states
        if self.in_place:
            return (self.keys, key_states), (self.values, value_states)
        return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2] + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[-2])

    def get_max_length(self) -> int:
        return -1


def _logits(
    step: PromptStep | TokenStep,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    mask: Mask,
    cache: Cache,
) -> torch.Tensor:
    told = {"logits_to_keep": 1} if step.keeps else {}
    made = step.model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **told,
    )
    logits: torch.Tensor = made.logits
    return logits


def _by_kind(kinds: Sequence[str], masks: Sequence[torch.Tensor]) -> Mask:
    """Masks as models take them: one for all layers, or one for each kind of layer."""
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else dict(zip(kinds, masks, strict=True))
