"""Comparing the compiled forward with the model's own, on a prompt and the tokens after it.

Loading compares, too: an epsilon or an activation in the configuration is not a weight, so equal weights do
not prove that a file fits a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from intarsia.compare import relative_error
from intarsia.generation.anatomy import Anatomy, new_cache
from intarsia.generation.forward import GeneratingForward

LEAST = 8  # tokens: a prompt of two with padding, and three tokens after it


@dataclass(frozen=True)
class Checked:
    """The largest error of logits and encoder states, and a sentence if it is too large."""

    error: float = 0.0
    fault: str | None = None


def worst(results: Iterable[Checked]) -> Checked:
    """The result with a fault, if there is one; otherwise the one with the largest error."""
    return max(results, key=lambda one: (one.fault is not None, one.error))


def checked(
    forward: GeneratingForward, rows: int, tolerance: float | None, examples: Sequence[torch.Tensor] = ()
) -> Checked:
    """The comparison for this number of rows, on random tokens and on the examples."""
    anatomy: Anatomy = forward.anatomy
    model: Any = forward.module
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (rows, LEAST), generator=generator).to(anatomy.device)
    mask = torch.ones_like(ids)
    if forward.by_rows[rows].masked_prompt is not None:
        mask[0, :2] = 0
    # Each program was compared elementwise when it was compiled. This comparison is about masks and caches.
    allowed = max(torch.finfo(anatomy.dtype).eps ** 0.5, tolerance or 0.0)
    keywords: dict[str, Any] = {"logits_to_keep": 1} if anatomy.keeps else {}
    most = 0.0
    if forward.encoder is not None:
        with torch.no_grad():
            of_encoder, states = _encoded(forward, rows)
        compiled, own = states
        most = relative_error(compiled, own, rows=rows)
        if not most <= allowed:
            return Checked(most, f"is off by {most:.3g} of the largest state of the encoder")
        keywords |= of_encoder | {"encoder_outputs": (states[1],)}
    for tokens, seen in [(ids, mask), *((tokens, torch.ones_like(tokens)) for tokens in examples)]:
        for end, error in _errors(forward, tokens, seen, keywords):
            most = max(most, error)
            if not error <= allowed:
                return Checked(error, f"is off by {error:.3g} of the largest logit at token {end}")
    return Checked(most)


def _errors(
    forward: GeneratingForward, ids: torch.Tensor, mask: torch.Tensor, keywords: Mapping[str, Any]
) -> Iterator[tuple[int, float]]:
    """The errors of the logits after a prompt and after each of the next three tokens, with their places."""
    anatomy = forward.anatomy
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    forwards: tuple[Any, Any] = (forward, forward.own)
    caches = [new_cache(forward.module) for _ in range(2)]
    length = ids.shape[1]
    start = length - 3
    middle = start - 2 if forward.by_rows[len(ids)].continued is not None else start
    ends = [0, *sorted({middle, start}), *range(start + 1, length + 1)]
    for begin, end in itertools.pairwise(ends):
        new, seen, places = ids[:, begin:end], mask[:, :end], positions[:, begin:end]
        with torch.no_grad():
            answer, truth = (
                call(**anatomy.call(new, cache, seen, places), **keywords).logits[:, -1]
                for call, cache in zip(forwards, caches, strict=True)
            )
        yield end, relative_error(answer, truth, rows=len(ids))


def _encoded(forward: GeneratingForward, rows: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The encoder's mask, if it takes one, and its states, compiled and by the model's own forward."""
    encoder = forward.encoder
    assert encoder is not None
    source, anatomy = encoder.source, forward.anatomy
    length = min(source.states, LEAST)
    value = source.example(rows, length, anatomy.device)
    masks: dict[str, Any] = {}
    if source.fixed:
        value = value.to(anatomy.dtype)
    elif encoder.masked is not None:
        mask = torch.ones_like(value)
        mask[0, length - 2 :] = 0
        masks = {"attention_mask": mask}
    arguments = {source.argument: value, **masks, "return_dict": True}
    calls: tuple[Any, Any] = (encoder, encoder.own)
    return masks, [call(**arguments).last_hidden_state for call in calls]
