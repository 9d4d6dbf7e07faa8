"""Masks: the keys that each new token attends to.

Masks are inputs of the programs, as booleans, which transformers uses unchanged. Padding attends to itself,
so that no row of the softmax is empty; its results are not used.
"""

from __future__ import annotations

import torch

_HIDDEN = -1e6  # makes a share 0, and engines can add it to scores exactly, unlike the lowest float


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
