"""The facts about a model that generation needs: keys and values, windows, positions, the encoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from intarsia.errors import InputError
from intarsia.generation.attention import ALIGNED, attention_mask

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of kinds of masks

Heads = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # (heads, size) of keys and values, by layer


@dataclass(frozen=True)
class Anatomy:
    """The parts of a decoder, read from one run of it, and of its encoder if it has one."""

    heads: Heads
    crossed: Heads  # of the attention to an encoder's states; empty without an encoder
    dtype: torch.dtype
    mask_dtype: torch.dtype  # booleans, or numbers that are added to the scores
    device: torch.device
    windows: tuple[tuple[str, int | None], ...]  # each kind of layer, and the length of its window
    keeps: bool  # whether programs for prompts return the logits of the last token alone
    positioned: bool  # whether forward takes positions; otherwise it counts the tokens in the cache
    source: Source | None
    result: Callable[..., Any]  # the class of forward's result

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in self.windows)

    @property
    def slides(self) -> bool:
        return any(window is not None for _, window in self.windows)

    @property
    def alike(self) -> bool:
        """Whether the keys and values of all layers have the same sizes.

        Then their memory is one tensor, and one copy writes a token's keys and values to it.
        """
        return len({sizes for layer in self.heads for sizes in layer}) == 1

    @property
    def stacked(self) -> bool:
        """Whether the program for a token takes the memory of all layers as one tensor.

        On a GPU this is less to pass. The engines of a CPU read each layer's part in place.
        """
        return self.device.type == "cuda" and self.alike

    def room(self, tokens: int) -> int:
        """The length of a layer's memory that holds so many tokens."""
        return tokens if self.device.type == "cpu" else -(-tokens // ALIGNED) * ALIGNED

    def named(self, argument: str) -> str:
        """The name of a decoder's argument in `forward`."""
        return argument if self.source is None else f"decoder_{argument}"

    def call(
        self,
        ids: torch.Tensor,
        cache: Cache,
        mask: Any = None,
        positions: torch.Tensor | None = None,
        source: Sequence[torch.Tensor] = (),
    ) -> dict[str, Any]:
        """The keywords of a call of `forward`; `source` has an encoder's states and perhaps their mask."""
        keywords = {self.named("input_ids"): ids, self.named("attention_mask"): mask}
        if positions is not None and self.positioned:
            keywords[self.named("position_ids")] = positions
        if source:
            keywords["encoder_outputs"] = (source[0],)
        if len(source) > 1:
            keywords["attention_mask"] = source[1]
        return {**keywords, "past_key_values": cache, "use_cache": True, "return_dict": True}

    def masks(self, seen: torch.Tensor, past: int, room: int | None) -> list[torch.Tensor]:
        """The mask of each kind of layer; see `attention_mask`."""
        return [
            attention_mask(seen, past=past, room=room, window=window, dtype=self.mask_dtype)
            for _, window in self.windows
        ]

    def empty(self, rows: int, room: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer, filled with zeros, for `room` tokens."""
        return self._zeros(self.heads, rows, room)

    def empty_crossed(self, rows: int, room: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of an encoder's states for every layer, filled with zeros."""
        return self._zeros(self.crossed, rows, room)

    def _zeros(self, heads: Heads, rows: int, room: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        def zeros(heads: int, size: int) -> torch.Tensor:
            return torch.zeros(rows, heads, room, size, dtype=self.dtype, device=self.device)

        return [(zeros(*keys), zeros(*values)) for keys, values in heads]


def new_cache(model: Any) -> Cache:
    """An empty cache, as `generate` creates it."""
    config = model.config.get_text_config(decoder=True)
    if not getattr(model.config, "is_encoder_decoder", False):
        return DynamicCache(config=config)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def anatomy_of(model: Any, max_length: int, max_source: int | None = None) -> Anatomy:
    """The parts of a model, read from a run on two tokens; InputError if the model cannot be compiled."""
    if not isinstance(model, nn.Module) or not hasattr(model, "generate") or not hasattr(model, "config"):
        raise InputError(
            f"compile_generation takes a transformers model that generates, not a {type(model).__name__}"
        )
    if model.training:
        raise InputError(f"{type(model).__name__} is in training; call eval() first")
    own: Any = model
    config = own.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)  # transformers 5 has no public name for it
    if attention not in ("sdpa", "eager"):
        raise InputError(
            f"{type(model).__name__} has the attention {attention!r}; supported are 'sdpa' and 'eager'"
            " (model.set_attn_implementation)"
        )
    source = source_of(own, max_length, max_source)
    prefix = "" if source is None else "decoder_"
    required = ["past_key_values", *(prefix + name for name in ("input_ids", "attention_mask"))]
    required += ["position_ids"] if source is None else ["encoder_outputs"]
    takes = inspect.signature(model.forward).parameters
    if missing := [name for name in required if name not in takes]:
        raise InputError(f"forward of {type(model).__name__} takes no {missing[0]}")
    _check_positions(own, config, source, max_length)
    cache = new_cache(own)
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=own.device)
        arguments: dict[str, Any] = {prefix + "input_ids": ids, "past_key_values": cache}
        if source is not None:
            arguments["encoder_outputs"] = (ids.new_zeros(1, source.states, source.hidden, dtype=own.dtype),)
        result = model(**arguments, use_cache=True, return_dict=True)
    if result.past_key_values is not cache:
        raise InputError(f"{type(model).__name__} does not fill the cache that is passed")
    layers = _layers(model, cache if source is None else cache.self_attention_cache)
    crossed = [] if source is None else _layers(model, cache.cross_attention_cache)
    windows: dict[str, int | None] = {}
    for layer in layers:
        reach = getattr(layer, "sliding_window", None)
        windows[FULL if reach is None else SLIDING] = None if reach is None or reach >= max_length else reach
    if set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}:
        raise InputError(f"{type(model).__name__} has layers of kinds {sorted(set(config.layer_types))}")
    if not any(windows.values()):
        windows = {FULL: None}  # no window is shorter than all there can be
    return Anatomy(
        heads=_heads(layers),
        crossed=_heads(crossed),
        dtype=layers[0].keys.dtype,
        mask_dtype=torch.bool if attention == "sdpa" else layers[0].keys.dtype,
        device=layers[0].keys.device,
        windows=tuple(windows.items()),
        keeps="logits_to_keep" in takes and source is None,
        positioned=f"{prefix}position_ids" in takes,
        source=source,
        result=type(result),
    )


def _layers(model: Any, cache: Any) -> list[Any]:
    """The layers that the run filled, since a cache may have as many as the encoder."""
    supported = (DynamicLayer, DynamicSlidingWindowLayer)
    if strange := {type(layer).__name__ for layer in cache.layers if type(layer) not in supported}:
        raise InputError(f"the cache of {type(model).__name__} has layers of kind {', '.join(strange)}")
    return [layer for layer in cache.layers if layer.is_initialized]


def _check_positions(model: Any, config: Any, source: Source | None, max_length: int) -> None:
    """InputError if the model has fewer positions, or positions that change with the length."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in rope:
            raise InputError(
                f"{type(model).__name__} has rotary embeddings of kind {kind!r}, which change with the length"
            )
    limit = getattr(config, "max_target_positions", getattr(config, "max_position_embeddings", None))
    if model.device.type != "cpu" or limit is None or max_length <= limit:
        return  # on a GPU, an index out of range would end the CUDA context
    last = torch.full((1, 1), max_length - 1)
    arguments: dict[str, Any] = {"input_ids": torch.zeros_like(last), "position_ids": last}
    if source is not None:
        states = torch.zeros(1, source.states, source.hidden, dtype=model.dtype)
        arguments = {"decoder_input_ids": torch.zeros(1, max_length).long(), "encoder_outputs": (states,)}
    try:
        with torch.no_grad():
            model(**arguments, use_cache=False)
    except IndexError as error:
        raise InputError(f"max_length is {max_length}, and {type(model).__name__} ends at {limit}") from error


def _heads(layers: list[Any]) -> Heads:
    def sizes(tensor: torch.Tensor) -> tuple[int, int]:
        return int(tensor.shape[1]), int(tensor.shape[3])

    return tuple((sizes(layer.keys), sizes(layer.values)) for layer in layers)


@dataclass(frozen=True)
class Source:
    """The input of an encoder, and the number of its states that a decoder attends to."""

    argument: str  # of the encoder's forward
    states: int  # the largest number; if `fixed`, the only one
    fixed: bool  # whether the number is always the same, without padding
    shape: tuple[int, ...]  # the largest shape of one row of the input
    hidden: int  # the size of a state
    result: Callable[..., Any]  # the class of what the encoder returns

    def example(self, rows: int, length: int, device: torch.device) -> torch.Tensor:
        """Rows of an example input: tokens 1, 2, 3 ..., or noise."""
        if self.fixed:
            noise = torch.randn(rows, *self.shape, generator=torch.Generator().manual_seed(0))
            return noise.to(device=device)
        return torch.arange(1, length + 1, device=device).expand(rows, length).contiguous()


def source_of(model: Any, max_length: int, max_source: int | None) -> Source | None:
    """The input of a model's encoder; None for a decoder; InputError for an encoder of another kind."""
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        if max_source is not None:
            raise InputError(f"max_source is {max_source}, and {type(model).__name__} has no encoder")
        return None
    argument = model.main_input_name
    if argument == "input_features" and hasattr(config, "max_source_positions"):
        states = int(config.max_source_positions)
        if max_source not in (None, states):
            raise InputError(f"max_source is {max_source}, and {type(model).__name__} reads {states} always")
        shape: tuple[int, ...] = (int(config.num_mel_bins), 2 * states)
    elif argument == "input_ids":
        limit = getattr(config, "max_position_embeddings", None)
        states = max_source or min(max_length, limit or max_length)
        shape = (states,)
    else:
        raise InputError(
            f"the encoder of {type(model).__name__} reads {argument}; supported are tokens and audio features"
        )
    fixed = argument == "input_features"
    value = torch.zeros(1, *shape, dtype=model.dtype if fixed else torch.long, device=model.device)
    try:
        with torch.no_grad():
            result = model.get_encoder()(**{argument: value}, return_dict=True)
    except (IndexError, ValueError) as error:
        raise InputError(
            f"the encoder of {type(model).__name__} reads no {states} tokens: {error}"
        ) from error
    sizes = tuple(result.last_hidden_state.shape)
    if sizes[:2] != (1, states):
        raise InputError(f"the encoder of {type(model).__name__} makes {sizes[1]} states of {states} tokens")
    return Source(argument, states, fixed, shape, int(sizes[2]), type(result))


_TOKENS = 4


def counts_tokens(model: nn.Module, own: Callable[..., Any], anatomy: Anatomy, *, masked: bool) -> bool:
    """Whether forward gives the same with positions 0, 1, 2 ... as without any, for a prompt and a token.

    OPT counts the tokens that the mask shows, and RoBERTa begins after its padding id. For such models,
    programs answer only calls that pass positions.
    """
    if not anatomy.positioned:
        return True  # no call can pass positions, and programs were compared without them
    caches = [new_cache(model) for _ in range(2)]
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    ids = (torch.arange(_TOKENS + 1, device=anatomy.device) % vocabulary)[None]
    seen = torch.ones_like(ids)
    seen[0, 0] = not masked
    source: list[torch.Tensor] = []
    if anatomy.source is not None:
        shape = (1, anatomy.source.states, anatomy.source.hidden)
        source = [torch.zeros(shape, dtype=anatomy.dtype, device=anatomy.device)]
    places = torch.arange(_TOKENS + 1, device=anatomy.device)[None]
    for start, end in ((0, _TOKENS), (_TOKENS, _TOKENS + 1)):
        new, mask = ids[:, start:end], seen[:, :end] if masked else None
        with torch.no_grad():
            counted, free = (
                own(**anatomy.call(new, cache, mask, positions, source)).logits[:, -1]
                for positions, cache in zip((places[:, start:end], None), caches, strict=True)
            )
        if not torch.equal(counted, free):
            return False
    return True
