"""Which positions a decoder takes where it is given none: most count tokens, some read masks instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from intarsia.generation.anatomy import Anatomy, new_cache

_TOKENS = 4


def counts_tokens(model: nn.Module, own: Callable[..., Any], anatomy: Anatomy, *, masked: bool) -> bool:
    """Whether a forward gives the same with positions 0, 1, 2 ... as without any, at a prompt and a token.

    OPT counts what the mask shows, RoBERTa begins behind its padding id: of such models, programs answer only
    calls that say which positions they mean.
    """
    if not anatomy.positioned:
        return True  # nobody can say them, so programs were compared without
    caches = [new_cache(model) for _ in range(2)]
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    ids = (torch.arange(_TOKENS + 1, device=anatomy.device) % vocabulary)[None]
    seen = torch.ones_like(ids)
    seen[0, 0] = not masked
    given: dict[str, Any] = {"use_cache": True, "return_dict": True}
    if anatomy.source is not None:
        shape = (1, anatomy.source.states, anatomy.source.hidden)
        given["encoder_outputs"] = (torch.zeros(shape, dtype=anatomy.dtype, device=anatomy.device),)
    places = torch.arange(_TOKENS + 1, device=anatomy.device)[None]
    for start, end in ((0, _TOKENS), (_TOKENS, _TOKENS + 1)):
        call = {**given, anatomy.named("input_ids"): ids[:, start:end]}
        if masked:
            call[anatomy.named("attention_mask")] = seen[:, :end]
        told = {anatomy.named("position_ids"): places[:, start:end]}
        with torch.no_grad():
            counted, free = (
                own(**call, **more, past_key_values=cache).logits[:, -1]
                for more, cache in zip((told, {}), caches, strict=True)
            )
        if not torch.equal(counted, free):
            return False
    return True
