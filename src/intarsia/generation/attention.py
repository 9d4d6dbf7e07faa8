"""Attention in the compiled steps, of one token to a cache and of a prompt, and its masks.

A token attends by products with the memory and with itself, which are not joined: `index_copy` or `cat` would
copy the cache in every layer, and a program would return a mutated input whole.

Masks are inputs of the programs, as booleans, which transformers uses unchanged. Padding attends to itself,
so that no row of the softmax is empty; its results are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from intarsia.engines.triton_kernels.operators import has_kernels
from intarsia.engines.triton_kernels.operators import token_attention as kernel

TOKEN, PROMPT = "intarsia_token", "intarsia_prompt"
ALIGNED = 8  # elements of 16 bits; kernels of a GPU are slower for rows that begin elsewhere
_HIDDEN = -1e6  # makes a share 0, and engines can add it to scores exactly, unlike the lowest float
_UNKNOWN = ("softcap", "s_aux", "head_mask")  # arguments of transformers' `sdpa` without an equivalent here


class Joined(NamedTuple):
    """The keys or values of a cache and those of a new token, as two tensors."""

    past: torch.Tensor
    new: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        rows, heads, length, size = self.past.shape
        return rows, heads, length + self.new.shape[2], size


def token_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token per row, which does not copy the cache.

    Keys and values are `Joined`, or tensors of an encoder's states. Heads that share keys are rows of one
    product, so keys are not repeated.
    """
    _check(dropout, others)
    if (
        isinstance(key, Joined)
        and position_bias is None
        and has_kernels(query)
        and attention_mask is not None
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        tensors = (query, key.past, value.past, key.new, value.new, attention_mask)
        return kernel(*tensors, scale).transpose(1, 2), None
    past_keys, past_values = (key.past, value.past) if isinstance(key, Joined) else (key, value)
    rows, heads, _, size = query.shape
    groups = past_keys.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    queries = (query * scale).reshape(rows, groups, heads // groups, size)
    scores = queries @ past_keys.transpose(2, 3)
    if isinstance(key, Joined):
        scores = torch.cat([scores, (queries * key.new).sum(-1, keepdim=True)], -1)
    scores = scores.float()
    # bfloat16's lowest number for bfloat16, so that engines may compute the softmax in it.
    unseen = torch.finfo(torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32).min
    if position_bias is not None:  # (rows or 1, heads, 1, keys)
        scores = scores + position_bias.reshape(-1, groups, heads // groups, scores.shape[-1])
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, unseen)
    room = past_keys.shape[2]
    if isinstance(key, Joined) and query.is_cuda:
        scores = nn.functional.pad(scores, (0, ALIGNED - 1), value=unseen)
    shares = torch.softmax(scores, -1).to(query.dtype)
    if isinstance(key, Joined):
        mixed = shares[..., :room] @ past_values + shares[..., room : room + 1] * value.new
    else:
        mixed = shares @ past_values
    return mixed.reshape(rows, heads, 1, -1).transpose(1, 2), None


def prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa` without its branch on whether there is more than one token."""
    _check(dropout, others)
    mask = attention_mask
    if position_bias is not None:
        mask = (
            position_bias if mask is None else torch.where(mask, position_bias, hidden(position_bias.dtype))
        )
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.transpose(1, 2), None


def _check(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError("attention with dropout")
    if unknown := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {unknown[0]}")


@contextmanager
def attending(model: Any, kind: str) -> Iterator[None]:
    """In the `with` block, the model uses the attention `TOKEN` or `PROMPT`."""
    before = model.config._attn_implementation  # transformers has no public name to read it by
    model.set_attn_implementation(kind)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention_mask(
    seen: torch.Tensor, *, past: int, room: int | None, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """The keys that a token attends to, of shape (rows, 1, new, keys): booleans, or numbers to add to scores.

    `seen` is true for tokens that are no padding: first the `past` ones, then the new ones. With `room`, the
    keys are that many places of a cache, of which the first `past` are filled, and the new tokens. Without
    it, the keys are the tokens. Each token attends to itself, so the keys and values of padding are finite.
    >>> seen = torch.tensor([[False, True, True, True]])
    >>> attention_mask(seen, past=3, room=5, window=None, dtype=torch.bool).int().tolist()
    [[[[0, 1, 1, 0, 0, 1]]]]
    >>> attention_mask(seen, past=0, room=None, window=2, dtype=torch.bool).int().tolist()[0][0]
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    rows, total = seen.shape
    places = torch.arange(total, device=seen.device)
    new_places = places[past:, None]
    visible = places[None] <= new_places
    if window is not None:
        visible &= places[None] > new_places - window
    attends = (visible & seen[:, None, None]) | (places[None] == new_places)
    if room is not None:
        inner = attends
        attends = seen.new_zeros(rows, 1, total - past, room + total - past)
        attends[..., :past] = inner[..., :past]
        attends[..., room:] = inner[..., past:]
    return _as(attends, dtype)


def token_mask(rows: int, past: int, room: int, window: int | None, device: torch.device) -> torch.Tensor:
    """`attention_mask` of one token that attends to all before it, with fewer operations.

    >>> token_mask(1, past=3, room=5, window=2, device=torch.device("cpu")).int().tolist()
    [[[[0, 0, 1, 0, 0, 1]]]]
    """
    attends = torch.zeros(rows, 1, 1, room + 1, dtype=torch.bool, device=device)
    attends[..., 0 if window is None else max(0, past + 1 - window) : past] = True
    attends[..., room:] = True
    return attends


def source_mask(seen: torch.Tensor, *, room: int | None, dtype: torch.dtype) -> torch.Tensor:
    """The encoder's states that are attended to, of shape (rows, 1, 1, states or room).

    >>> source_mask(torch.tensor([[True, False]]), room=4, dtype=torch.bool).int().tolist()
    [[[[1, 0, 0, 0]]]]
    """
    if room is not None:
        seen = torch.nn.functional.pad(seen, (0, room - seen.shape[1]), value=False)
    return _as(seen[:, None, None], dtype)


def hidden(dtype: torch.dtype) -> float:
    """The number that is added to the score of a key that is not attended to."""
    return max(torch.finfo(dtype).min, _HIDDEN)


def _as(attends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return attends
    least = torch.full((), hidden(dtype), dtype=dtype, device=attends.device)
    return torch.where(attends, torch.zeros_like(least), least)


AttentionInterface.register(TOKEN, token_attention)
AttentionInterface.register(PROMPT, prompt_attention)
