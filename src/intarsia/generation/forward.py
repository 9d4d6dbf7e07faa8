"""The forwards of a decoder and of an encoder, with compiled programs.

`forward` is replaced and not `generate`, since sampling, beams, stopping and streaming change with each
release of transformers, and all of them call `forward`. The model keeps its class, which pipelines of
transformers check. The keys and values of an encoder's states are computed by the decoder's program for
prompts, since a model computes them in the decoder's layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy, Source, counts_tokens
from intarsia.generation.attention import source_mask, token_mask
from intarsia.generation.call import Call, arguments, parsed
from intarsia.generation.storage import StoredLayer, append_to, stack_of, stored
from intarsia.runtime.forwards import CompiledModel, PlacedForward
from intarsia.runtime.weights import release_memory


class EncoderForward(PlacedForward):
    """An encoder's `forward`: a program without and one with padding. Other calls use the encoder's own."""

    asks_weights = True

    def __init__(
        self,
        encoder: nn.Module,
        anatomy: Anatomy,
        source: Source,
        plain: CompiledModel,
        masked: CompiledModel | None,
    ) -> None:
        super().__init__(type(encoder).__name__, encoder)
        self.anatomy: Anatomy = anatomy
        self.source: Source = source
        self.plain: CompiledModel = plain
        self.masked: CompiledModel | None = masked
        self.runs["encoder"] = 0

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config: Any = self.module.config
        named = arguments(inspect.signature(self), config, args, kwargs)
        value, mask = named.pop(self.source.argument, None), named.pop("attention_mask", None)
        returns_dict = named.pop("return_dict", getattr(config, "return_dict", True))
        if strange := [name for name in named if name != "use_cache"]:
            raise InputError(f"{strange[0]} is passed, which is not supported")
        if not isinstance(value, torch.Tensor) or value.device != self.anatomy.device:
            raise InputError(f"{self.source.argument} is missing or not on {self.anatomy.device}")
        masks: list[torch.Tensor] = []
        if mask is not None and not self.source.fixed:
            if tuple(mask.shape) != tuple(value.shape):
                raise InputError(
                    f"its attention_mask is {tuple(mask.shape)}, and its {self.source.argument} are"
                    f" {tuple(value.shape)}"
                )
            seen = mask != 0
            if not bool(seen.any(-1).all()):
                raise InputError("one of its rows is padding only")
            if not bool(seen.all()):
                masks = [source_mask(seen, room=None, dtype=self.anatomy.mask_dtype)]
        program = self.masked if masks else self.plain
        if program is None:
            raise InputError("it has padding; compiled without padding (padding=True allows it)")
        result = self.source.result(last_hidden_state=_states(program, [value.contiguous(), *masks]))
        self.runs["encoder"] += 1
        return result if returns_dict else result.to_tuple()


def _states(program: CompiledModel, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The result of a program. One row is passed twice if the program needs several."""
    try:
        states: torch.Tensor = program(*inputs)
    except InputError:
        if inputs[0].shape[0] != 1:
            raise
        states = program(*(torch.cat([tensor, tensor]) for tensor in inputs))[:1]
    return states


@dataclass(frozen=True)
class Programs:
    """Programs for one number of rows: prompts without and with masks, a token, several tokens after a cache.

    With an encoder, there is one program for prompts, which takes masks.
    """

    prompt: CompiledModel | None
    masked_prompt: CompiledModel | None
    token: CompiledModel
    continued: CompiledModel | None = None


@dataclass(frozen=True)
class _Memory:
    """The layers of a cache with memory of a fixed length: of tokens, and of an encoder's states."""

    tokens: list[StoredLayer]
    states: list[StoredLayer]

    def tensors(self, stacked: bool) -> list[torch.Tensor]:
        """The memory as a program takes it: one tensor for all layers of tokens, or two for each layer."""
        if stacked:
            return [stack_of(self.tokens), *_Memory(self.states, []).tensors(stacked=False)]
        layers = [*self.tokens, *self.states]
        return [store for layer in layers for store in (layer.key_store, layer.value_store)]


class GeneratingForward(PlacedForward):
    """A decoder's `forward`: compiled programs for prompts and tokens. Other calls use the model's own.

    Both use the same cache: a `DynamicCache` of transformers (with an encoder, a pair of them) whose layers
    have memory of a fixed length. So a call without a compiled program may come at any time.
    """

    asks_weights = True

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        programs: Mapping[int, Programs],
        max_length: int,
        encoder: EncoderForward | None = None,
    ) -> None:
        super().__init__(type(model).__name__, model)
        self.anatomy: Anatomy = anatomy
        self.by_rows: dict[int, Programs] = dict(programs)
        self.max_length: int = max_length
        self.room: int = anatomy.room(max_length)
        self.encoder: EncoderForward | None = encoder
        self.loop: Callable[..., Any] | None = None  # replaces `generate` if steps can be taken
        self.tolerance: float | None = None  # with which its programs were compiled
        self.programs: list[CompiledModel] = [
            program
            for each in programs.values()
            for program in (each.prompt, each.masked_prompt, each.token, each.continued)
            if program is not None
        ]
        self._counted_tokens: dict[bool, bool] = {}  # without and with a mask
        self.runs |= {"prompt": 0, "token": 0}
        if any(each.continued is not None for each in programs.values()):
            self.runs["continued"] = 0
        self._examples = {rows: (anatomy.empty(rows), anatomy.empty_crossed(rows)) for rows in programs}

    def enable(self, on: bool = True) -> None:
        super().enable(on)
        if self.encoder is not None:
            self.encoder.enable(on)

    def put(self) -> None:
        super().put()
        if self.loop is not None:
            self.module.__dict__["generate"] = self.loop
        if self.encoder is not None:
            self.encoder.put()

    def take_out(self) -> None:
        super().take_out()
        if self.loop is not None and vars(self.module).get("generate") is self.loop:
            del self.module.__dict__["generate"]
            self.loop = None  # releases its graphs
        if self.encoder is not None:
            self.encoder.take_out()

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = arguments(inspect.signature(self), self.module.config, args, kwargs)
        call = parsed(self.module, self.anatomy, named)
        rows, new = call.ids.shape
        programs = self.by_rows.get(rows)
        if programs is None:
            raise InputError(f"it has {rows} rows; compiled for {', '.join(map(str, self.by_rows))}")
        if call.ids.device != self.anatomy.device:
            raise InputError(f"input_ids are on {call.ids.device}, and the model on {self.anatomy.device}")
        past = int(call.cache.get_seq_length())
        if past + new > self.max_length:
            raise InputError(f"it reaches token {past + new}, and max_length is {self.max_length}")
        wants_logits = self.anatomy.keeps and call.logit_count != 1
        is_continued = new > 1 and self.anatomy.source is None and (past > 0 or wants_logits)
        if is_continued and programs.continued is None:
            where = f"after {past} in the cache" if past else "and logits of the whole prompt are requested"
            raise InputError(f"it has {new} new tokens {where} (continued=True compiles for that)")
        seen = call.mask
        if seen is not None:
            if seen.shape != (rows, past + new):
                raise InputError(
                    f"its attention_mask is {tuple(seen.shape)}, and the tokens {(rows, past + new)}"
                )
            seen = seen != 0
            if bool(seen.all()):
                seen = None
            elif not bool(seen[:, -1].all()):
                raise InputError("its last token is padding")
        positions = call.positions
        if positions is None:
            if not self._counts_tokens(masked=seen is not None):
                raise InputError(
                    "no position_ids are passed, and the model computes others than 0, 1, 2 and so on"
                )
            positions = torch.arange(past, past + new, device=call.ids.device).expand(rows, new)
        elif positions.shape not in ((rows, new), (1, new)) or positions.dtype != torch.long:
            raise InputError(f"its position_ids are {positions.dtype} {tuple(positions.shape)}")
        memory = self._memory(call, rows)
        is_prompt = new > 1 and not is_continued
        if self.anatomy.source is not None:
            is_prompt = not memory.states[0].length
        if is_prompt and past:
            raise InputError(f"its cache has {past} tokens, and none of the encoder's states")
        if new > 1 and not (is_prompt or is_continued):
            raise InputError(f"it has {new} new tokens after an encoder's states in the cache")
        program = (programs.continued if is_continued else None) or programs.token
        if is_prompt:
            plain = seen is None and programs.prompt is not None
            chosen = programs.prompt if plain else programs.masked_prompt
            if chosen is None:
                raise InputError("it has padding; compiled without padding (padding=True allows it)")
            program = chosen
        ids, positions = call.ids, positions.expand(rows, new)
        if is_prompt and new == 1:  # programs take two tokens or more: a second one that the first cannot see
            ids, positions = torch.cat([ids, ids], 1), torch.cat([positions, positions], 1)
            seen = None if seen is None else torch.cat([seen, seen], 1)
        feed = [ids.contiguous(), positions.contiguous()]
        if program is not programs.prompt:
            masks = self._masks(seen, rows, past, ids.shape[1], None if is_prompt else self.room)
            if is_continued:  # first the masks of the memory, then those of the new tokens
                parts = [mask[..., : self.room] for mask in masks] + [
                    mask[..., self.room :] for mask in masks
                ]
                masks = [part.contiguous() for part in parts]
            feed += masks
        if self.anatomy.source is not None:
            feed += self._source(call, memory, is_prompt)
        if not is_prompt:
            feed += memory.tensors(self.anatomy.stacked)
        results = program(*feed)
        self.runs["prompt" if is_prompt else "continued" if is_continued else "token"] += 1
        return self._finish(call, memory, results)

    def _counts_tokens(self, *, masked: bool) -> bool:
        """Whether the model's own positions are 0, 1, 2 and so on. This is tried at the first call."""
        if masked not in self._counted_tokens:
            counts = counts_tokens(self.module, self.own, self.anatomy, masked=masked)
            self._counted_tokens[masked] = counts
            release_memory(self.module)  # its own forward has read all weights
        return self._counted_tokens[masked]

    def layers_of(self, cache: Any, rows: int) -> list[StoredLayer]:
        """The layers of a decoder's cache, with memory for this number of rows."""
        return stored(cache, self.room, self._examples[rows][0])

    def _memory(self, call: Call, rows: int) -> _Memory:
        source, (like, like_states) = self.anatomy.source, self._examples[rows]
        caches = [(call.cache, self.room, like)]
        if source is not None:
            if type(call.cache) is not EncoderDecoderCache:
                raise InputError(
                    f"the cache is a {type(call.cache).__name__}; compiled for an EncoderDecoderCache"
                )
            caches = [
                (call.cache.self_attention_cache, self.room, like),
                (call.cache.cross_attention_cache, source.states, like_states),
            ]
        memories: list[list[StoredLayer]] = []
        for cache, room, alike in caches:
            layers = stored(cache, room, alike)
            if any(layer.room != room for layer in layers):
                raise InputError(f"its cache was made for {layers[0].room} tokens; compiled for {room}")
            memories.append(layers)
        if self.anatomy.alike:
            stack_of(memories[0])
        return _Memory(memories[0], memories[1] if source is not None else [])

    def _masks(
        self, seen: torch.Tensor | None, rows: int, past: int, new: int, room: int | None
    ) -> list[torch.Tensor]:
        if seen is None:
            if room is not None and new == 1 and self.anatomy.mask_dtype == torch.bool:
                place = (rows, past, room)
                return [token_mask(*place, window, self.anatomy.device) for _, window in self.anatomy.windows]
            seen = torch.ones(rows, past + new, dtype=torch.bool, device=self.anatomy.device)
        return self.anatomy.masks(seen, past, room)

    def _source(self, call: Call, memory: _Memory, is_prompt: bool) -> list[torch.Tensor]:
        """The encoder's inputs of a program: the states, for a prompt, and which of them are no padding."""
        source, states = self.anatomy.source, call.encoded[0]
        assert source is not None
        count = int(states.shape[1] if is_prompt else memory.states[0].length)
        if count > source.states or (source.fixed and count != source.states):
            raise InputError(f"the encoder has {count} states; compiled for {source.states} (max_source)")
        feed = [states.contiguous()] if is_prompt else []
        if source.fixed:
            return feed
        seen = torch.ones(states.shape[0], count, dtype=torch.bool, device=self.anatomy.device)
        if call.source_mask is not None:
            seen = call.source_mask != 0
            if seen.shape[1] != count:
                raise InputError(f"its attention_mask has {seen.shape[1]} states, and the cache {count}")
            if not bool(seen.any(-1).all()):
                raise InputError("one row of the encoder's states is padding only")
        room = None if is_prompt else source.states
        return [*feed, source_mask(seen, room=room, dtype=self.anatomy.mask_dtype)]

    def _finish(self, call: Call, memory: _Memory, results: Any) -> Any:
        """The model's kind of result; the new keys and values are written to the cache."""
        logits, *slices = results
        new, end = call.ids.shape[1], 2 * len(memory.tokens)
        if not self.anatomy.keeps or logits.shape[1] > 1:
            logits = logits[:, :new]
            logits = logits[:, -call.logit_count :] if call.logit_count else logits
        if len(slices) == 1:  # a token, with layers of equal sizes
            append_to(memory.tokens, slices[0])
        else:
            for layer, keys, values in zip(memory.tokens, slices[:end:2], slices[1:end:2], strict=True):
                layer.append(keys[:, :, :new], values[:, :, :new])
        if slices[end:]:  # a prompt after an encoder
            for layer, keys, values in zip(memory.states, slices[end::2], slices[end + 1 :: 2], strict=True):
                layer.append(keys, values)
            call.cache.is_updated.update(dict.fromkeys(range(len(memory.states)), True))
        of_encoder = {}
        if call.encoded:
            names = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
            of_encoder = dict(zip(names, call.encoded, strict=True))
        result = self.anatomy.result(logits=logits, past_key_values=call.cache, **of_encoder)
        return result if call.returns_dict else result.to_tuple()
