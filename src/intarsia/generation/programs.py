"""The programs of a model that generates: for its encoder, prompts, single tokens and several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from intarsia.compare import relative_error
from intarsia.compiler.entry import compile_with
from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy
from intarsia.generation.attention import source_mask
from intarsia.generation.check import LEAST
from intarsia.generation.forward import EncoderForward
from intarsia.generation.steps import ContinuedStep, EncoderStep, PromptStep, TokenStep
from intarsia.logs import LOG
from intarsia.options import CompileOptions
from intarsia.runtime.forwards import CompiledModel

_USUAL = 16  # tokens of an example
_PROMPT = 128  # tokens of a prompt's example; with 16, another plan may be the fastest


@dataclass(frozen=True)
class GenerationJob:
    """One `compile_generation`: the model, the calls its programs are for, and examples of prompts.

    Its methods compile the programs, those of decoders for a number of rows.
    """

    model: nn.Module
    anatomy: Anatomy
    rows: tuple[int, ...]
    max_length: int
    padding: bool | None
    examples: Sequence[torch.Tensor]
    continued: bool = False

    def __post_init__(self) -> None:
        if self.continued and self.anatomy.source is not None:
            raise InputError(
                f"continued=True is for decoders, and {type(self.model).__name__} has an encoder"
            )
        for one in self.examples:
            if self.anatomy.source is not None:
                raise InputError(
                    f"examples are prompts of decoders, and {type(self.model).__name__} has an encoder"
                )
            if not isinstance(one, torch.Tensor) or one.ndim != 2 or one.dtype != torch.long:
                is_tensor = isinstance(one, torch.Tensor)
                what = f"{one.dtype} {tuple(one.shape)}" if is_tensor else repr(one)
                raise InputError(f"an example is {what}; it must be token ids, rows by tokens, of torch.long")
            if one.shape[0] not in self.rows or not LEAST <= one.shape[1] <= self.max_length:
                rows = " or ".join(map(str, self.rows))
                raise InputError(
                    f"an example is {tuple(one.shape)}; it must have {rows} rows and {LEAST} to"
                    f" {self.max_length} tokens"
                )

    def examples_of(self, rows: int) -> list[torch.Tensor]:
        """The examples with this number of rows."""
        return [one.to(self.anatomy.device) for one in self.examples if one.shape[0] == rows]

    def _pads(self, rows: int) -> bool:
        """Whether calls of this number of rows may be padded; by default, if there are several."""
        return rows > 1 if self.padding is None else self.padding

    def encoder(self, options: CompileOptions) -> EncoderForward | None:
        """The encoder for 1 row up to the largest number, since beams share states; None if there is none."""
        model: Any = self.model
        anatomy, source = self.anatomy, self.anatomy.source
        if source is None:
            return None
        most, length = max(self.rows), min(source.states, _USUAL)
        value = source.example(most, length, anatomy.device).to(
            torch.long if not source.fixed else anatomy.dtype
        )
        shape: dict[int, Any] = {} if source.fixed else {1: Dim("source", min=1, max=source.states)}
        of_mask = {} if source.fixed else {3: shape[1]}
        if most > 1:
            shape[0] = of_mask[0] = Dim("rows", min=1, max=most)
        step = EncoderStep(model, anatomy, source.argument)
        plain = compile_with(options, step, (value,), dynamic_shapes={"value": shape})
        masked = None
        if not source.fixed and self._pads(most):
            seen = torch.ones_like(value, dtype=torch.bool)
            mask = source_mask(seen, room=None, dtype=anatomy.mask_dtype)
            shapes = {"value": shape, "masks": (of_mask,)}
            masked = compile_with(options, step, (value, mask), dynamic_shapes=shapes)
        return EncoderForward(model.get_encoder(), anatomy, source, plain, masked)

    def prompts(
        self, rows: int, options: CompileOptions
    ) -> tuple[CompiledModel | None, CompiledModel | None]:
        """Programs for prompts of this many rows, without and with masks; None for one that is not needed.

        Programs are timed with the first example.
        """
        anatomy = self.anatomy
        ids, *others = self.examples_of(rows) or [_usual(anatomy, rows, self.max_length // 2, _PROMPT)]
        dim = Dim("length", min=2, max=self.max_length)  # for one token, attention and strides differ

        def prompt(with_masks: bool) -> CompiledModel:
            encoded, of_encoded = _encoded(anatomy, rows)

            def feed(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
                masks = anatomy.masks(_all(ids), past=0, room=None) if with_masks else []
                return (ids, _positions(ids), *masks, *encoded)

            shapes: dict[str, Any] = {"input_ids": {1: dim}, "position_ids": {1: dim}}
            if with_masks or encoded:
                count = len(anatomy.windows) if with_masks else 0
                shapes["rest"] = (*({2: dim, 3: dim} for _ in range(count)), *of_encoded)
            more = [feed(one) for one in others]
            step = PromptStep(self.model, anatomy)
            return compile_with(options.changed(examples=more), step, feed(ids), dynamic_shapes=shapes)

        plain = masked = None
        if not anatomy.slides and anatomy.source is None:
            plain = prompt(with_masks=False)
        if plain is None or self._pads(rows):
            masked = prompt(with_masks=True)
        return plain, masked

    def token(self, rows: int, options: CompileOptions) -> CompiledModel:
        """A program for one token in each row, after those in the cache."""
        anatomy, room = self.anatomy, self.anatomy.room(self.max_length)
        more: list[torch.Tensor] = []
        crossed: list[torch.Tensor] = []
        if (source := anatomy.source) is not None:
            count = min(source.states, _USUAL)
            crossed = _noise(
                anatomy.empty_crossed(rows, source.states), source.states if source.fixed else count
            )
            if not source.fixed:
                seen = torch.ones(rows, count, dtype=torch.bool, device=anatomy.device)
                more.append(source_mask(seen, room=source.states, dtype=anatomy.mask_dtype))

        def feed(ids: torch.Tensor, memory: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            masks = anatomy.masks(_all(ids), past=ids.shape[1] - 1, room=room)
            memory = [torch.stack(list(memory))] if anatomy.stacked else memory
            last, position = ids[:, -1:].contiguous(), _positions(ids)[:, -1:].contiguous()
            return (last, position, *masks, *more, *memory, *crossed)

        calls = [feed(one, _after(self.model, anatomy, one[:, :-1], room)) for one in self.examples_of(rows)]
        if not calls:
            ids = _usual(anatomy, rows, self.max_length)
            calls = [feed(ids, _noise(anatomy.empty(rows, room), ids.shape[1] - 1))]
        step = _token_step(self.model, anatomy, calls[0])
        return compile_with(options.changed(examples=calls[1:]), step, calls[0])

    def continuation(self, rows: int, options: CompileOptions) -> CompiledModel | None:
        """A program for several tokens in each row, after those in the cache, if the user wants one."""
        if not self.continued:
            return None
        anatomy, room = self.anatomy, self.anatomy.room(self.max_length)
        dim = Dim("new", min=2, max=self.max_length)

        def feed(ids: torch.Tensor, memory: Sequence[torch.Tensor], past: int) -> tuple[torch.Tensor, ...]:
            masks = anatomy.masks(_all(ids), past=past, room=room)
            memory = [torch.stack(list(memory))] if anatomy.stacked else memory
            split = [mask[..., :room] for mask in masks] + [mask[..., room:] for mask in masks]
            new, positions = ids[:, past:], _positions(ids)[:, past:]
            return tuple(one.contiguous() for one in (new, positions, *split, *memory))

        calls = []
        examples = self.examples_of(rows)
        for ids in examples or [_usual(anatomy, rows, self.max_length)]:
            past = ids.shape[1] // 2
            if examples:
                memory = _after(self.model, anatomy, ids[:, :past], room)
            else:
                memory = _noise(anatomy.empty(rows, room), past)
            calls.append(feed(ids, memory, past))
        count = len(anatomy.windows)
        rest = [{2: dim}] * count + [{2: dim, 3: dim}] * count + [{}] * (len(calls[0]) - 2 - 2 * count)
        shapes = {"input_ids": {1: dim}, "position_ids": {1: dim}, "rest": tuple(rest)}
        step = ContinuedStep(self.model, anatomy)
        return compile_with(options.changed(examples=calls[1:]), step, calls[0], dynamic_shapes=shapes)


def _usual(anatomy: Anatomy, rows: int, most: int, usual: int = _USUAL) -> torch.Tensor:
    """Tokens 1, 2, 3 ... in every row, from 1 again after 16, since some vocabularies are small."""
    length = min(most, usual)
    ids = torch.arange(length, device=anatomy.device) % _USUAL + 1
    return ids.expand(rows, length).contiguous()


def _all(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()


def _after(model: nn.Module, anatomy: Anatomy, ids: torch.Tensor, room: int) -> list[torch.Tensor]:
    """The memory of every layer after the model has read these tokens."""
    masks = anatomy.masks(_all(ids), past=0, room=None) if anatomy.slides else []
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
