"""The modules that are compiled for generation: an encoder, a prompt, one or several tokens after a cache.

A token reads the whole memory under a mask, filled or not, so shapes are fixed and calls are fast. With 512
tokens and half a billion weights, the memory is less than a hundredth of what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from intarsia.generation.anatomy import Anatomy
from intarsia.generation.attention import PROMPT, TOKEN, Joined, attending


class EncoderStep(nn.Module):
    """An encoder: its input, and a mask of four dimensions or none. It returns the states."""

    def __init__(self, model: Any, anatomy: Anatomy, argument: str) -> None:
        super().__init__()
        self.training = False  # as the model is
        self.encoder: nn.Module = model.get_encoder()
        self.anatomy: Anatomy = anatomy
        self.argument: str = argument

    def forward(self, value: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        masked = {"attention_mask": masks[0]} if masks else {}
        with _prompts(self.encoder, self.anatomy):
            result = self.encoder(**{self.argument: value}, **masked, return_dict=True)
        states: torch.Tensor = result.last_hidden_state
        return states


class _DecoderStep(nn.Module):
    """A call of the decoder, as it is in evaluation."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        super().__init__()
        self.training = False  # as the model is
        self.model: nn.Module = model
        self.anatomy: Anatomy = anatomy

    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        masks: Sequence[torch.Tensor],
        cache: Cache,
        source: Sequence[torch.Tensor] = (),
        keeps: bool = True,
    ) -> torch.Tensor:
        anatomy = self.anatomy
        call = anatomy.call(input_ids, cache, _by_kind(anatomy.kinds, masks), position_ids, source)
        if anatomy.keeps and keeps:
            call["logits_to_keep"] = 1
        logits: torch.Tensor = self.model(**call).logits
        return logits

    def layers(
        self, memory: Sequence[torch.Tensor], position_ids: torch.Tensor, in_place: bool = False
    ) -> list[_PastLayer]:
        """The layers of a cache over its memory."""
        start = None if self.anatomy.positioned else position_ids[0, 0]
        pairs = zip(memory[::2], memory[1::2], strict=True)
        return [_PastLayer(keys, values, start, in_place) for keys, values in pairs]

    def with_slices(self, logits: torch.Tensor, layers: Sequence[_PastLayer]) -> Any:
        """The result of a step: logits, and the new keys and values of each layer."""
        slices = [tensor for layer in layers for tensor in (layer.new_keys, layer.new_values)]
        return (logits, torch.stack(slices)) if self.anatomy.alike else (logits, *slices)


class PromptStep(_DecoderStep):
    """The tokens of a prompt. It returns logits, and keys and values of each layer.

    The logits are those of the last token if the model takes `logits_to_keep`. With an encoder, it also takes
    the states and their mask, and returns their keys and values after the others.
    """

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        if self.anatomy.source is None:
            cache = DynamicCache()
            logits = self.logits(input_ids, position_ids, rest, cache)
            return logits, *_pairs(cache.layers)
        count = len(self.anatomy.kinds)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with _prompts(self.model, self.anatomy):
            logits = self.logits(input_ids, position_ids, rest[:count], cache, rest[count:])
        own, crossed = cache.self_attention_cache, cache.cross_attention_cache
        return logits, *_pairs(own.layers), *_pairs(crossed.layers)


class TokenStep(_DecoderStep):
    """One token for each row. It takes masks and the cache's memory, and returns logits and the new slices.

    Memory and slices are one tensor of keys and one of values for each layer. If all layers have equal sizes,
    the slices are one tensor, and the memory is one if `stacked`.

    With an encoder, a mask of its states follows the other masks unless their number is fixed, and the keys
    and values of the states follow the memory. With `in_place`, attention reads the memory in place (see
    `attention.py`). Without it, for models with an attention of their own, memory and token are concatenated.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, in_place: bool) -> None:
        super().__init__(model, anatomy)
        self.in_place: bool = in_place

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        source, count = self.anatomy.source, len(self.anatomy.kinds)
        masks, others = rest[:count], rest[count:]
        encoded: tuple[torch.Tensor, ...] = ()
        if source is not None:
            # The model checks that there are states. It reads their keys and values from the cache.
            kind: dict[str, Any] = {"dtype": self.anatomy.dtype, "device": self.anatomy.device}
            encoded = (torch.zeros(input_ids.shape[0], source.states, 1, **kind),)
            if not source.fixed:
                encoded, others = (*encoded, others[0]), others[1:]
        if self.anatomy.stacked:
            others = (*others[0].unbind(), *others[1:])
        end = 2 * len(self.anatomy.heads)
        layers = self.layers(others[:end], position_ids, self.in_place)
        cache = Cache(layers=layers)
        if source is not None:
            crossed = zip(others[end::2], others[end + 1 :: 2], strict=True)
            cache = EncoderDecoderCache(cache, Cache(layers=[_filled(*pair) for pair in crossed]))
        with attending(self.model, TOKEN) if self.in_place else nullcontext():
            logits = self.logits(input_ids, position_ids, masks, cache, encoded)
        return self.with_slices(logits, layers)


class ContinuedStep(_DecoderStep):
    """Several tokens for each row after those in a cache.

    It takes masks of the cache's memory, masks of the new tokens, and the memory. It returns the logits of
    all new tokens, and slices as a `TokenStep`.
    """

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        count = len(self.anatomy.kinds)
        masks = [torch.cat(pair, -1) for pair in zip(rest[:count], rest[count : 2 * count], strict=True)]
        memory = rest[2 * count :]
        if self.anatomy.stacked:
            memory = memory[0].unbind()
        layers = self.layers(memory, position_ids)
        with _prompts(self.model, self.anatomy):
            logits = self.logits(input_ids, position_ids, masks, Cache(layers=layers), keeps=False)
        return self.with_slices(logits, layers)


class _PastLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """The whole memory of a layer, filled or not, and the new token.

    `start` is the number of tokens in it, for models that count positions by the cache.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor | None, in_place: bool
    ) -> None:
        super().__init__()
        self.start, self.in_place = start, in_place
        self.keys, self.values, self.is_initialized = keys, values, True
        self.new_keys, self.new_values = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.new_keys, self.new_values = key_states, value_states
        if self.in_place:
            return Joined(self.keys, key_states), Joined(self.values, value_states)
        return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2] + query_length, 0

    def get_seq_length(self) -> Any:
        return int(self.keys.shape[-2]) if self.start is None else self.start

    def get_max_length(self) -> int:
        return -1


def _filled(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    return layer


def _pairs(layers: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _prompts(model: Any, anatomy: Anatomy) -> AbstractContextManager[None]:
    return attending(model, PROMPT) if anatomy.mask_dtype == torch.bool else nullcontext()


def _by_kind(
    kinds: Sequence[str], masks: Sequence[torch.Tensor]
) -> torch.Tensor | Mapping[str, torch.Tensor] | None:
    """Masks in a model's form: one for all layers, or one for each kind of layer."""
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else dict(zip(kinds, masks, strict=True))
