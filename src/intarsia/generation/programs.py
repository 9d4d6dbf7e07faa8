"""The programs of a model that generates: its encoder, prompts, and single tokens, each compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from intarsia.compiler import compile
from intarsia.generation.anatomy import Anatomy
from intarsia.generation.check import relative_error
from intarsia.generation.encoder import EncoderForward
from intarsia.generation.forward import Programs
from intarsia.generation.masks import attention_mask, source_mask
from intarsia.generation.steps import EncoderStep, PromptStep, TokenStep
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled

_USUAL = 16  # tokens of an example


def compiled_encoder(
    model: Any, anatomy: Anatomy, rows: Sequence[int], padding: bool | None, options: Mapping[str, Any]
) -> EncoderForward | None:
    """The encoder, for 1 row to the most there are (beams share what is read); None where there is none."""
    source = anatomy.source
    if source is None:
        return None
    most, length = max(rows), min(source.states, _USUAL)
    given = source.example(most, length, anatomy.device).to(torch.long if not source.fixed else anatomy.dtype)
    shape: dict[int, Any] = {} if source.fixed else {1: Dim("source", min=1, max=source.states)}
    of_mask = {} if source.fixed else {3: shape[1]}
    if most > 1:
        shape[0] = of_mask[0] = Dim("rows", min=1, max=most)
    step = EncoderStep(model, anatomy, source.argument)
    plain = compile(step, (given,), dynamic_shapes={"given": shape}, **options)
    masked = None
    if not source.fixed and (padding or (padding is None and most > 1)):
        seen = torch.ones_like(given, dtype=torch.bool)
        mask = source_mask(seen, room=None, dtype=anatomy.mask_dtype)
        masked = compile(step, (given, mask), dynamic_shapes={"given": shape, "masks": (of_mask,)}, **options)
    return EncoderForward(model.get_encoder(), anatomy, source, plain, masked)


def compiled_programs(
    model: nn.Module,
    anatomy: Anatomy,
    rows: int,
    max_length: int,
    padding: bool | None,
    options: Mapping[str, Any],
) -> Programs:
    """Prompts and tokens of so many rows."""
    length = min(max_length, _USUAL)
    ids = torch.arange(1, length + 1, device=anatomy.device).expand(rows, length).contiguous()
    positions = torch.arange(length, device=anatomy.device).expand(rows, length).contiguous()
    seen = torch.ones(rows, length, dtype=torch.bool, device=anatomy.device)
    dim = Dim("length", min=2, max=max_length)  # at one token, attention and strides take other paths

    def prompt(masks: Sequence[torch.Tensor]) -> Compiled | PartlyCompiled:
        shapes: dict[str, Any] = {"input_ids": {1: dim}, "position_ids": {1: dim}}
        encoded, of_encoded = _encoded(anatomy, rows)
        if masks or encoded:
            shapes["rest"] = (*({2: dim, 3: dim} for _ in masks), *of_encoded)
        feed = (ids, positions, *masks, *encoded)
        return compile(PromptStep(model, anatomy), feed, dynamic_shapes=shapes, **options)

    plain = masked = None
    if not anatomy.slides and anatomy.source is None:
        plain = prompt(())
    if plain is None or padding or (padding is None and rows > 1):
        masked = prompt(_masks(anatomy, seen, past=0, room=None))
    memory = _noise(anatomy.empty(rows, max_length), length - 1)
    masks = _masks(anatomy, seen, past=length - 1, room=max_length)
    if (source := anatomy.source) is not None:
        known = min(source.states, _USUAL)
        memory += _noise(anatomy.empty_crossed(rows, source.states), source.states if source.fixed else known)
        if not source.fixed:
            masks.append(
                source_mask(seen.new_ones(rows, known), room=source.states, dtype=anatomy.mask_dtype)
            )
    feed = (ids[:, -1:].contiguous(), positions[:, -1:].contiguous(), *masks, *memory)
    token = compile(_token_step(model, anatomy, feed), feed, **options)
    return Programs(plain, masked, token)


def _encoded(anatomy: Anatomy, rows: int) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """States of an encoder and a mask of them, with their dynamic sizes; nothing where there is none."""
    source = anatomy.source
    if source is None:
        return [], []
    count = source.states if source.fixed else min(source.states, _USUAL)
    drawn = torch.randn(rows, count, source.hidden, generator=torch.Generator().manual_seed(0))
    states = drawn.to(dtype=anatomy.dtype, device=anatomy.device)
    if source.fixed:
        return [states], [{}]
    dim = Dim("source", min=1, max=source.states)
    seen = torch.ones(rows, count, dtype=torch.bool, device=anatomy.device)
    return [states, source_mask(seen, room=None, dtype=anatomy.mask_dtype)], [{1: dim}, {3: dim}]


def _token_step(model: nn.Module, anatomy: Anatomy, feed: Sequence[torch.Tensor]) -> TokenStep:
    """The step that reads the cache where it stands, if the model's attention can be replaced for it."""
    step = TokenStep(model, anatomy, in_place=False)
    if anatomy.mask_dtype != torch.bool:
        return step
    other = TokenStep(model, anatomy, in_place=True)
    try:
        with torch.no_grad():
            found, expected = other(*feed)[0], step(*feed)[0]
    except Exception:  # a model may do anything with its keys: it then has them as it knows them
        return step
    return other if relative_error(found, expected) <= torch.finfo(anatomy.dtype).eps ** 0.5 else step


def _noise(memory: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> list[torch.Tensor]:
    """The memory of every layer, with so many tokens drawn at random."""
    tensors = [tensor for pair in memory for tensor in pair]
    for tensor in tensors:
        tensor[:, :, :length].normal_(generator=torch.Generator(tensor.device).manual_seed(0))
    return tensors


def _masks(anatomy: Anatomy, seen: torch.Tensor, past: int, room: int | None) -> list[torch.Tensor]:
    return [
        attention_mask(seen, past=past, room=room, window=window, dtype=anatomy.mask_dtype)
        for _, window in anatomy.windows
    ]
