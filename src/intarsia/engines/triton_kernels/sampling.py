"""A Triton kernel that draws a token of each row among the most likely ones. Imported on a GPU only.

transformers sorts the whole vocabulary for `top_p` and computes two softmaxes over it. After `top_k` only so
many logits matter. `torch.topk` launches twenty kernels for one row; here each block of a row sorts its own
logits, and the kernel that draws the token sorts the best of all blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits that a program reads at once
_SORTED = 2048  # logits that a program sorts
_MOST = 1024  # candidates of a row; with 2048 of them, `torch.topk` is faster (H200)


@triton.jit  # type: ignore[untyped-decorator]
def _candidates(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, vocabulary, count, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logits of one block of a row, in descending order."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    place = block * BLOCK + within
    logits = tl.load(logits_ptr + row * vocabulary + place, mask=place < vocabulary, other=-float("inf"))
    out = out_ptr + (row * tl.num_programs(1) + block) * count
    tl.store(out + within, tl.sort(logits, descending=True), mask=within < count)


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(  # type: ignore[no-untyped-def]
    logits_ptr, candidates_ptr, noise_ptr, out_ptr, vocabulary, candidates, count, top_p,
    BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One row: which logits are likely enough, then the one with the largest share divided by its noise."""
    row = tl.program_id(0).to(tl.int64)
    at, within = tl.arange(0, CANDIDATES), tl.arange(0, BLOCK)
    best = tl.load(candidates_ptr + row * candidates + at, mask=at < candidates, other=-float("inf"))
    best = tl.sort(best, descending=True)
    inside = at < count
    best = tl.where(inside, best, -float("inf"))
    highest = tl.max(best, 0)
    lowest = tl.min(tl.where(inside, best, float("inf")), 0)
    shares = tl.exp(best - highest)
    # `top_k` keeps all logits that equal the last one, so they take part in the sum.
    equal = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        place = start + within
        logits = tl.load(logits_ptr + row * vocabulary + place, mask=place < vocabulary, other=-float("inf"))
        equal += (logits == lowest).to(tl.int32)
    more = tl.sum(equal, 0) - tl.sum((inside & (best == lowest)).to(tl.int32), 0)
    total = tl.sum(shares, 0) + more.to(tl.float32) * tl.exp(lowest - highest)
    likelier = tl.cumsum(shares, 0) - shares
    cutoff = tl.min(tl.where(inside & (likelier < top_p * total), best, float("inf")), 0)
    value = tl.full([BLOCK], -1.0, tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        place = start + within
        here = place < vocabulary
        logits = tl.load(logits_ptr + row * vocabulary + place, mask=here, other=-float("inf"))
        noise = tl.load(noise_ptr + row * vocabulary + place, mask=here, other=1.0)
        share = tl.where(here & (logits >= cutoff), tl.exp(logits - highest) / noise, -1.0)
        token = tl.where(share > value, place, token)
        value = tl.maximum(value, share)
    first = tl.min(tl.where(value == tl.max(value, 0), token, vocabulary), 0)
    tl.store(out_ptr + row, first.to(tl.int64))


def drawn_tokens(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """A token of each row of float32 logits, drawn as `torch.multinomial` draws one from their softmax.

    Of logits that are equal `top_p` keeps all or none: which of them transformers keeps is the sort's choice.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    count, blocks = min(top_k, vocabulary), triton.cdiv(vocabulary, _SORTED)
    if blocks * count <= _MOST:
        candidates = logits.new_empty(rows, blocks * count)
        _candidates[(rows, blocks)](logits, candidates, vocabulary, count, BLOCK=_SORTED, num_warps=8)
    else:
        candidates = torch.topk(logits, count).values
    noise = torch.empty_like(logits).exponential_(1)
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    _drawn[(rows,)](
        logits, candidates, noise, out, vocabulary, candidates.shape[1], count, top_p,
        BLOCK=_BLOCK, CANDIDATES=max(2, triton.next_power_of_2(candidates.shape[1])), num_warps=8,
    )  # fmt: skip
    return out
