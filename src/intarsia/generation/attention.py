"""Attention of one token to a cache and to itself, which reads the cache where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

NAME = "intarsia_token"
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")  # what `sdpa` of transformers does with these


def token_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Scores with the cache and with the token are put side by side, and the cache is not copied to do so.

    Keys and values are pairs: what the cache holds, and the new token's. Heads that share keys are rows of
    one product, so that keys are not repeated for them either.
    """
    if not isinstance(key, tuple) or not isinstance(value, tuple) or attention_mask is None or dropout:
        raise NotImplementedError("attention to something else than a cache and a token")
    if told := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {told[0]}")
    (past_keys, new_keys), (past_values, new_values) = key, value
    rows, heads, _, size = query.shape
    groups = past_keys.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    asked = (query * scale).reshape(rows, groups, heads // groups, size)
    scores = torch.cat(
        [asked @ past_keys.transpose(2, 3), (asked * new_keys).sum(-1, keepdim=True)], -1
    ).float()
    scores = scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    shares = torch.softmax(scores, -1).to(query.dtype)
    room = past_keys.shape[2]
    mixed = shares[..., :room] @ past_values + shares[..., room:] * new_values
    return mixed.reshape(rows, heads, 1, -1).transpose(1, 2), None


@contextmanager
def attending_to_tokens(model: Any) -> Iterator[None]:
    """Within it, the model's attention is `token_attention`."""
    before = model.config._attn_implementation  # transformers has no public name to read it by
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(NAME, token_attention)
