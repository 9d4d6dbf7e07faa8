"""The programs of a model that generates: for its encoder, prompts, single tokens and several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from intarsia.compare import relative_error
from intarsia.compiler.entry import compile_with
from intarsia.generation.anatomy import Anatomy
from intarsia.generation.encoder import EncoderForward
from intarsia.generation.masks import attention_mask, source_mask
from intarsia.generation.steps import ContinuedStep, EncoderStep, PromptStep, TokenStep
from intarsia.logs import LOG
from intarsia.options import CompileOptions
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled

_USUAL = 16  # tokens of an example
_PROMPT = 128  # tokens of a prompt's example; with 16, another plan may be the fastest


def compiled_encoder(
    model: Any, anatomy: Anatomy, rows: Sequence[int], padding: bool | None, options: CompileOptions
) -> EncoderForward | None:
    """The encoder for 1 row up to the largest number, since beams share states; None without an encoder."""
    source = anatomy.source
    if source is None:
        return None
    most, length = max(rows), min(source.states, _USUAL)
    value = source.example(most, length, anatomy.device).to(torch.long if not source.fixed else anatomy.dtype)
    shape: dict[int, Any] = {} if source.fixed else {1: Dim("source", min=1, max=source.states)}
    of_mask = {} if source.fixed else {3: shape[1]}
    if most > 1:
        shape[0] = of_mask[0] = Dim("rows", min=1, max=most)
    step = EncoderStep(model, anatomy, source.argument)
    plain = compile_with(options, step, (value,), dynamic_shapes={"value": shape})
    masked = None
    if not source.fixed and (padding or (padding is None and most > 1)):
        seen = torch.ones_like(value, dtype=torch.bool)
        mask = source_mask(seen, room=None, dtype=anatomy.mask_dtype)
        shapes = {"value": shape, "masks": (of_mask,)}
        masked = compile_with(options, step, (value, mask), dynamic_shapes=shapes)
    return EncoderForward(model.get_encoder(), anatomy, source, plain, masked)


def compiled_prompts(
    model: nn.Module,
    anatomy: Anatomy,
    rows: int,
    max_length: int,
    padding: bool | None,
    examples: Sequence[torch.Tensor],
    options: CompileOptions,
) -> tuple[Compiled | PartlyCompiled | None, Compiled | PartlyCompiled | None]:
    """Programs for prompts of this many rows, without and with masks; None for one that is not needed.

    Programs are timed with the first example.
    """
    ids, *others = examples or [_usual(anatomy, rows, max_length // 2, _PROMPT)]
    dim = Dim("length", min=2, max=max_length)  # for one token, attention and strides differ

    def prompt(with_masks: bool) -> Compiled | PartlyCompiled:
        encoded, of_encoded = _encoded(anatomy, rows)

        def feed(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            masks = _masks(anatomy, ids, past=0, room=None) if with_masks else []
            return (ids, _positions(ids), *masks, *encoded)

        shapes: dict[str, Any] = {"input_ids": {1: dim}, "position_ids": {1: dim}}
        if with_masks or encoded:
            count = len(anatomy.windows) if with_masks else 0
            shapes["rest"] = (*({2: dim, 3: dim} for _ in range(count)), *of_encoded)
        more = [feed(one) for one in others]
        step = PromptStep(model, anatomy)
        return compile_with(options.changed(examples=more), step, feed(ids), dynamic_shapes=shapes)

    plain = masked = None
    if not anatomy.slides and anatomy.source is None:
        plain = prompt(with_masks=False)
    if plain is None or padding or (padding is None and rows > 1):
        masked = prompt(with_masks=True)
    return plain, masked


def compiled_token(
    model: nn.Module,
    anatomy: Anatomy,
    rows: int,
    max_length: int,
    examples: Sequence[torch.Tensor],
    options: CompileOptions,
) -> Compiled | PartlyCompiled:
    """A program for one token in each row, after those in the cache."""
    room = anatomy.room(max_length)
    more: list[torch.Tensor] = []
    crossed: list[torch.Tensor] = []
    if (source := anatomy.source) is not None:
        count = min(source.states, _USUAL)
        crossed = _noise(anatomy.empty_crossed(rows, source.states), source.states if source.fixed else count)
        if not source.fixed:
            seen = torch.ones(rows, count, dtype=torch.bool, device=anatomy.device)
            more.append(source_mask(seen, room=source.states, dtype=anatomy.mask_dtype))

    def feed(ids: torch.Tensor, memory: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        masks = _masks(anatomy, ids, past=ids.shape[1] - 1, room=room)
        memory = [torch.stack(list(memory))] if anatomy.stacked else memory
        last, position = ids[:, -1:].contiguous(), _positions(ids)[:, -1:].contiguous()
        return (last, position, *masks, *more, *memory, *crossed)

    calls = [feed(one, _after(model, anatomy, one[:, :-1], room)) for one in examples]
    if not calls:
        ids = _usual(anatomy, rows, max_length)
        calls = [feed(ids, _noise(anatomy.empty(rows, room), ids.shape[1] - 1))]
    step = _token_step(model, anatomy, calls[0])
    return compile_with(options.changed(examples=calls[1:]), step, calls[0])


def compiled_continuation(
    model: nn.Module,
    anatomy: Anatomy,
    rows: int,
    max_length: int,
    examples: Sequence[torch.Tensor],
    options: CompileOptions,
) -> Compiled | PartlyCompiled:
    """A program for several tokens in each row, after those in the cache."""
    room = anatomy.room(max_length)
    dim = Dim("new", min=2, max=max_length)

    def feed(ids: torch.Tensor, memory: Sequence[torch.Tensor], past: int) -> tuple[torch.Tensor, ...]:
        masks = _masks(anatomy, ids, past=past, room=room)
        memory = [torch.stack(list(memory))] if anatomy.stacked else memory
        split = [mask[..., :room] for mask in masks] + [mask[..., room:] for mask in masks]
        new, positions = ids[:, past:], _positions(ids)[:, past:]
        return tuple(one.contiguous() for one in (new, positions, *split, *memory))

    calls = []
    for ids in examples or [_usual(anatomy, rows, max_length)]:
        past = ids.shape[1] // 2
        memory = (
            _after(model, anatomy, ids[:, :past], room)
            if examples
            else _noise(anatomy.empty(rows, room), past)
        )
        calls.append(feed(ids, memory, past))
    count = len(anatomy.windows)
    rest = [{2: dim}] * count + [{2: dim, 3: dim}] * count + [{}] * (len(calls[0]) - 2 - 2 * count)
    shapes = {"input_ids": {1: dim}, "position_ids": {1: dim}, "rest": tuple(rest)}
    step = ContinuedStep(model, anatomy)
    return compile_with(options.changed(examples=calls[1:]), step, calls[0], dynamic_shapes=shapes)


def _usual(anatomy: Anatomy, rows: int, most: int, usual: int = _USUAL) -> torch.Tensor:
    """Tokens 1, 2, 3 ... in every row, from 1 again after 16, since some vocabularies are small."""
    length = min(most, usual)
    ids = torch.arange(length, device=anatomy.device) % _USUAL + 1
    return ids.expand(rows, length).contiguous()


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()


def _after(model: nn.Module, anatomy: Anatomy, ids: torch.Tensor, room: int) -> list[torch.Tensor]:
    """The memory of every layer after the model has read these tokens."""
    masks = _masks(anatomy, ids, past=0, room=None) if anatomy.slides else []
    with torch.no_grad():
        _, *computed = PromptStep(model, anatomy)(ids, _positions(ids), *masks)
    memory = [tensor for pair in anatomy.empty(ids.shape[0], room) for tensor in pair]
    for store, tensor in zip(memory, computed, strict=True):
        store[:, :, : ids.shape[1]] = tensor
    return memory


def _encoded(anatomy: Anatomy, rows: int) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """States of an encoder and a mask of them, with their dynamic sizes; empty without an encoder."""
    source = anatomy.source
    if source is None:
        return [], []
    count = source.states if source.fixed else min(source.states, _USUAL)
    noise = torch.randn(rows, count, source.hidden, generator=torch.Generator().manual_seed(0))
    states = noise.to(dtype=anatomy.dtype, device=anatomy.device)
    if source.fixed:
        return [states], [{}]
    dim = Dim("source", min=1, max=source.states)
    seen = torch.ones(rows, count, dtype=torch.bool, device=anatomy.device)
    return [states, source_mask(seen, room=None, dtype=anatomy.mask_dtype)], [{1: dim}, {3: dim}]


def _token_step(model: nn.Module, anatomy: Anatomy, feed: Sequence[torch.Tensor]) -> TokenStep:
    """The step that reads the cache in place, if the model's attention can be replaced for it."""
    step = TokenStep(model, anatomy, in_place=False)
    if anatomy.mask_dtype != torch.bool:
        return step
    other = TokenStep(model, anatomy, in_place=True)
    try:
        with torch.no_grad():
            logits, expected = other(*feed)[0], step(*feed)[0]
    except Exception as error:  # a model may use keys in ways that `Joined` does not support
        LOG.info("attention does not read the cache in place: %s: %s", type(error).__name__, error)
        return step
    return other if relative_error(logits, expected) <= torch.finfo(anatomy.dtype).eps ** 0.5 else step


def _noise(memory: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> list[torch.Tensor]:
    """The memory of every layer, with `length` random tokens."""
    tensors = [tensor for pair in memory for tensor in pair]
    for tensor in tensors:
        tensor[:, :, :length].normal_(generator=torch.Generator(tensor.device).manual_seed(0))
    return tensors


def _masks(anatomy: Anatomy, ids: torch.Tensor, past: int, room: int | None) -> list[torch.Tensor]:
    seen = torch.ones_like(ids, dtype=torch.bool)
    return [
        attention_mask(seen, past=past, room=room, window=window, dtype=anatomy.mask_dtype)
        for _, window in anatomy.windows
    ]
