"""Triton kernels of attention: with a mask, and of one token to a cache. Imported on a GPU only.

Each block of scores is computed, masked and summed up in registers (the running maximum of a row rescales
what was summed before), so that neither scores nor a mask of numbers are ever written to memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1e30)  # below all scores; a row that sees nothing sums up to zero


# Lengths and the mask's strides vary from call to call: a kernel must not be compiled again for some of them.
# The mask's last stride must be 1: bytes at a stride took 4 times as long (GPT-2, batch 32, H200).
@triton.jit(do_not_specialize=["queries", "keys", "mask_row", "mask_head", "mask_query"])  # type: ignore[untyped-decorator]
def _masked(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, out_row, out_head, out_place,
    mask_row, mask_head, mask_query,
    heads, shared, queries, keys, scale,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    IS_BOOL: tl.constexpr, IS_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: all keys or the earlier ones, with a mask of booleans or numbers."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    at_q = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at_k = tl.arange(0, KEYS)
    within = tl.arange(0, SIZE)
    here = at_q < queries
    q_ptrs = q_ptr + row * q_row + head * q_head + at_q[:, None] * q_place + within[None]
    k_ptrs = k_ptr + row * k_row + (head // shared) * k_head + within[None]
    v_ptrs = v_ptr + row * v_row + (head // shared) * v_head + within[None]
    mask_ptrs = mask_ptr + row * mask_row + head * mask_head
    q = tl.load(q_ptrs, mask=here[:, None], other=0.0)
    highest = tl.full([QUERIES], _LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE], tl.float32)
    last = tl.minimum(keys, (tl.program_id(0) + 1) * QUERIES) if IS_CAUSAL else keys
    for start in range(0, last, KEYS):
        place = start + at_k
        inside = place < keys
        seen = inside[None]
        if IS_CAUSAL:
            seen = seen & (place[None] <= at_q[:, None])
        k = tl.load(k_ptrs + place[:, None] * k_place, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        if IS_ROW:
            mask = tl.load(mask_ptrs + place, mask=inside, other=0)[None]
        else:
            pairs = here[:, None] & inside[None]
            mask = tl.load(mask_ptrs + at_q[:, None] * mask_query + place[None], mask=pairs, other=0)
        if IS_BOOL:
            scores = tl.where(seen & (mask != 0), scores, -float("inf"))
        else:
            scores = scores + mask.to(tl.float32) * 1.4426950408889634
            scores = tl.where(seen, scores, -float("inf"))
        highest_now = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - highest_now[:, None])
        rescale = tl.exp2(highest - highest_now)
        total = total * rescale + tl.sum(shares, 1)
        v = tl.load(v_ptrs + place[:, None] * v_place, mask=inside[:, None], other=0.0)
        mixed = mixed * rescale[:, None] + tl.dot(shares.to(v.dtype), v)
        highest = highest_now
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + row * out_row + head * out_head + at_q[:, None] * out_place + within[None]
    tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=here[:, None])


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """Attention under a mask that is expanded to (rows, heads, queries, keys)."""
    rows, heads, queries, size = query.shape
    shared, keys = heads // key.shape[1], key.shape[2]
    mask = mask.expand(*mask.shape[:-1], keys)
    mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).expand(rows, heads, queries, keys)
    out = query.new_empty(rows, queries, heads, size).transpose(1, 2)
    mask_strides = mask.stride()
    is_bool = mask.dtype == torch.bool
    block, is_row = 64, mask_strides[2] == 0
    # Loading a mask of pairs while the products before are computed: 17 us, where one stage took 24 (GPT-2's
    # heads, 32 rows of 128 tokens, H200). A mask of one row took 11 us with either.
    stages = 1 if is_row or size > 128 else 2
    _masked[(triton.cdiv(queries, block), rows * heads)](
        query, key, value, mask.view(torch.uint8) if is_bool else mask, out,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *mask_strides[:3],
        heads, shared, queries, keys, scale,
        SIZE=size, QUERIES=block, KEYS=64, IS_BOOL=is_bool, IS_ROW=is_row, IS_CAUSAL=is_causal,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _token(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr, mask_ptr, out_ptr,
    q_row, q_head, k_row, k_head, k_place, v_row, v_head, v_place,
    new_k_row, new_k_head, new_v_row, new_v_head, mask_row,
    kv_heads, room, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The heads that share one head of keys, for one row: the token, then the cache's filled places."""
    row, kv = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    member, within, at_k = tl.arange(0, PADDED), tl.arange(0, SIZE), tl.arange(0, KEYS)
    real = member < GROUP
    head = kv * GROUP + member
    q_ptrs = q_ptr + row * q_row + head[:, None] * q_head
    new_k_ptrs = new_k_ptr + row * new_k_row + kv * new_k_head
    q = tl.load(q_ptrs + within[None], mask=real[:, None], other=0.0)
    new_k = tl.load(new_k_ptrs + within)
    new_v = tl.load(new_v_ptr + row * new_v_row + kv * new_v_head + within)
    factor = scale * 1.4426950408889634
    # A token always attends to itself: the running sums begin with it.
    highest = tl.sum(q.to(tl.float32) * new_k[None].to(tl.float32), 1) * factor
    total = tl.full([PADDED], 1.0, tl.float32)
    mixed = tl.zeros([PADDED, SIZE], tl.float32) + new_v[None].to(tl.float32)
    k_base, v_base = k_ptr + row * k_row + kv * k_head, v_ptr + row * v_row + kv * v_head
    for start in range(0, room, KEYS):
        place = start + at_k
        seen = tl.load(mask_ptr + row * mask_row + place, mask=place < room, other=0) != 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            k = tl.load(k_base + place[:, None] * k_place + within[None], mask=seen[:, None], other=0.0)
            v = tl.load(v_base + place[:, None] * v_place + within[None], mask=seen[:, None], other=0.0)
            scores = tl.where(seen[None], tl.dot(q, tl.trans(k)) * factor, -float("inf"))
            highest_now = tl.maximum(highest, tl.max(scores, 1))
            shares = tl.exp2(scores - highest_now[:, None])
            rescale = tl.exp2(highest - highest_now)
            total = total * rescale + tl.sum(shares, 1)
            mixed = mixed * rescale[:, None] + tl.dot(shares.to(v.dtype), v)
            highest = highest_now
    out_ptrs = out_ptr + (row * kv_heads * GROUP + head[:, None]) * SIZE + within[None]
    tl.store(out_ptrs, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


def token_attention(
    query: torch.Tensor,
    past_keys: torch.Tensor,
    past_values: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one token to a cache and itself; the mask is (rows or 1, 1, 1, room + 1)."""
    rows, heads, _, size = query.shape
    kv_heads, room = past_keys.shape[1:3]
    group = heads // kv_heads
    out = query.new_empty(rows, 1, heads, size)
    seen = mask.view(torch.uint8).expand(rows, 1, 1, room + 1)
    arguments: tuple[Any, ...] = (
        query, past_keys, past_values, new_key, new_value, seen, out,
        *query.stride()[:2], *past_keys.stride()[:3], *past_values.stride()[:3],
        *new_key.stride()[:2], *new_value.stride()[:2], seen.stride(0), kv_heads, room, scale,
    )  # fmt: skip
    padded = max(16, triton.next_power_of_2(group))
    _token[(rows * kv_heads,)](
        *arguments, GROUP=group, PADDED=padded, SIZE=size, KEYS=64, num_warps=4, num_stages=2
    )
    return out.transpose(1, 2)
