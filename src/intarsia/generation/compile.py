"""`compile_generation`: a program for prompts, one for single tokens, put in place of a decoder's forward."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache

from intarsia.compiler import compile
from intarsia.errors import InputError
from intarsia.generation.anatomy import Anatomy, anatomy_of
from intarsia.generation.forward import GeneratingForward, Programs
from intarsia.generation.generation import Generation
from intarsia.generation.masks import attention_mask
from intarsia.generation.steps import PromptStep, TokenStep
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled
from intarsia.tuning.options import checked

_LEAST = 8  # tokens; a prompt of two, padding, and some tokens after it must fit


def compile_generation(
    model: nn.Module,
    *,
    max_length: int,
    batch: int | Sequence[int] = 1,
    padding: bool | None = None,
    **options: Any,
) -> Generation:
    """Let `model.generate(...)` run compiled: sampling, beams, stopping and streaming stay transformers' own.

    `model` is a decoder of transformers in evaluation. Two programs are compiled: one for prompts of 2 to
    `max_length` tokens, and one for a single token. They share the cache, memory for `max_length` tokens,
    prompt included, into which the new keys and values of each token are written. `batch` is the number of
    rows of a call, or several: sequences times beams. `padding` says whether prompts may be padded (on the
    left); None: where there is more than one row. `options` are those of `compile`.
    Any other call (longer, another number of rows, attentions asked for, weights changed ...) is answered by
    the model's own forward, on the same cache, with a warning that says why.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with compile_generation(model, max_length=8, engines="pytorch"):
    ...     model.generate(torch.tensor([[1, 5]]), max_new_tokens=3, min_new_tokens=3).shape
    torch.Size([1, 5])
    """
    checked_options = checked(options)
    rows = (batch,) if isinstance(batch, int) else tuple(batch)
    if not rows or any(not isinstance(n, int) or n < 1 for n in rows):
        raise InputError(f"batch is {batch!r}; it must be a number of rows, or several")
    if max_length < _LEAST:
        raise InputError(f"max_length is {max_length}; it must be {_LEAST} or more")
    anatomy = anatomy_of(model, max_length)
    programs = {n: _programs(model, anatomy, n, max_length, padding, checked_options) for n in rows}
    forward = GeneratingForward(model, anatomy, programs, max_length)
    made = Generation(model, forward)
    faults = [fault for n in rows if (fault := _fault(forward, n, options.get("tolerance"))) is not None]
    if faults:
        forward.enabled = False
        made.notes = (f"the model runs as it is, in PyTorch: compiled, it {faults[0]}",)
        warnings.warn(made.notes[0], stacklevel=2)
    forward.put()
    return made


def _programs(
    model: nn.Module,
    anatomy: Anatomy,
    rows: int,
    max_length: int,
    padding: bool | None,
    options: Mapping[str, Any],
) -> Programs:
    length = min(max_length, 16)
    ids = torch.arange(1, length + 1, device=anatomy.device).expand(rows, length).contiguous()
    positions = torch.arange(length, device=anatomy.device).expand(rows, length).contiguous()
    seen = torch.ones(rows, length, dtype=torch.bool, device=anatomy.device)
    dim = Dim("length", min=2, max=max_length)

    def prompt(masks: Sequence[torch.Tensor]) -> Compiled | PartlyCompiled:
        shapes: dict[str, Any] = {"input_ids": {1: dim}, "position_ids": {1: dim}}
        if masks:
            shapes["masks"] = tuple({2: dim, 3: dim} for _ in masks)
        step = PromptStep(model, anatomy.kinds, anatomy.keeps)
        return compile(step, (ids, positions, *masks), dynamic_shapes=shapes, **options)

    plain = None if anatomy.slides else prompt(())
    masked = None
    if anatomy.slides or padding or (padding is None and rows > 1):
        masked = prompt(_masks(anatomy, seen, past=0, room=None))
    masks = _masks(anatomy, seen, past=length - 1, room=max_length)
    memory = [tensor for pair in anatomy.empty(rows, max_length) for tensor in pair]
    for tensor in memory:
        tensor[:, :, : length - 1].normal_(generator=torch.Generator(tensor.device).manual_seed(0))
    feed = (ids[:, -1:].contiguous(), positions[:, -1:].contiguous(), *masks, *memory)
    token = compile(_token_step(model, anatomy, feed), feed, **options)
    return Programs(plain, masked, token)


def _token_step(model: nn.Module, anatomy: Anatomy, feed: Sequence[torch.Tensor]) -> TokenStep:
    """The step that reads the cache where it stands, if the model's attention can be replaced for it."""
    step = TokenStep(model, anatomy.kinds, anatomy.keeps, in_place=False)
    if anatomy.mask_dtype != torch.bool:
        return step
    other = TokenStep(model, anatomy.kinds, anatomy.keeps, in_place=True)
    try:
        with torch.no_grad():
            found, expected = other(*feed)[0], step(*feed)[0]
    except Exception:  # a model may do anything with its keys: it then has them as it knows them
        return step
    return other if _error(found, expected) <= torch.finfo(anatomy.dtype).eps ** 0.5 else step


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _masks(anatomy: Anatomy, seen: torch.Tensor, past: int, room: int | None) -> list[torch.Tensor]:
    return [
        attention_mask(seen, past=past, room=room, window=window, dtype=anatomy.mask_dtype)
        for _, window in anatomy.windows
    ]


def _fault(forward: GeneratingForward, rows: int, tolerance: float | None) -> str | None:
    """What is wrong with the compiled forward, by the model's own on a prompt and some tokens after it."""
    programs, device = forward.by_rows[rows], forward.anatomy.device
    model: Any = forward.module
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (rows, _LEAST), generator=made).to(device)
    mask = torch.ones_like(ids)
    if programs.masked_prompt is not None:
        mask[0, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    caches = [DynamicCache(config=model.config.get_text_config(decoder=True)) for _ in range(2)]
    forwards: tuple[Any, Any] = (forward, forward.own)
    start = _LEAST - 3
    # Programs were compared element by element when they were compiled; this is about masks and caches.
    allowed = max(torch.finfo(forward.anatomy.dtype).eps ** 0.5, tolerance or 0.0)
    with torch.no_grad():
        for begin, end in [(0, start), *((n, n + 1) for n in range(start, _LEAST))]:
            told: dict[str, Any] = {"logits_to_keep": 1} if forward.anatomy.keeps else {}
            answers = [
                call(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, begin:end],
                    past_key_values=cache,
                    use_cache=True,
                    return_dict=True,
                    **told,
                ).logits
                for call, cache in zip(forwards, caches, strict=True)
            ]
            error = _error(*answers)
            if not error <= allowed:
                return f"is off by {error:.3g} of the largest logit at token {end}"
    return None
