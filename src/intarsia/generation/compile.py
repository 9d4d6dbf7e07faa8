"""`compile_generation`: compiled programs in place of the forward of a model that generates."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from intarsia.errors import InputError
from intarsia.generation.anatomy import anatomy_of
from intarsia.generation.check import LEAST, fault
from intarsia.generation.forward import GeneratingForward
from intarsia.generation.generation import Generation
from intarsia.generation.programs import compiled_encoder, compiled_programs
from intarsia.tuning.options import checked


def compile_generation(
    model: nn.Module,
    *,
    max_length: int,
    batch: int | Sequence[int] = 1,
    padding: bool | None = None,
    max_source: int | None = None,
    **options: Any,
) -> Generation:
    """Let `model.generate(...)` run compiled: sampling, beams, stopping and streaming stay transformers' own.

    `model` is a decoder of transformers, or an encoder with a decoder, in evaluation. Two programs are
    compiled for a decoder: one for prompts of 2 to `max_length` tokens, and one for a single token. They
    share the cache, memory for `max_length` tokens, prompt included, into which the new keys and values of
    each token are written. An encoder is a program of its own, for up to `max_source` tokens (None: as many
    as `max_length`, if it has no length of its own); keys and values of its states are computed with the
    prompt, once. `batch` is the number of rows of a call, or several: sequences times beams. `padding` says
    whether what is read may be padded; None: where there is more than one row. `options` are `compile`'s.
    Any other call (longer, another number of rows, attentions asked for, weights changed ...) is answered by
    the model's own forward, on the same cache, with a warning that says why.

    >>> import torch
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
    if max_length < LEAST:
        raise InputError(f"max_length is {max_length}; it must be {LEAST} or more")
    if max_source is not None and max_source < 1:
        raise InputError(f"max_source is {max_source}; it must be 1 or more")
    anatomy = anatomy_of(model, max_length, max_source)
    encoder = compiled_encoder(model, anatomy, rows, padding, checked_options)
    programs = {n: compiled_programs(model, anatomy, n, max_length, padding, checked_options) for n in rows}
    forward = GeneratingForward(model, anatomy, programs, max_length, encoder)
    made = Generation(model, forward)
    faults = [told for n in rows if (told := fault(forward, n, options.get("tolerance"))) is not None]
    if faults:
        made.enable(False)
        made.notes = (f"the model runs as it is, in PyTorch: compiled, it {faults[0]}",)
        warnings.warn(made.notes[0], stacklevel=2)
    forward.put()
    return made
