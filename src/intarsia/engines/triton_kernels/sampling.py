"""A Triton kernel that draws a token of each row among the most likely ones. Imported on a GPU only.

transformers sorts the whole vocabulary for `top_p` and computes two softmaxes over it. After `top_k` only so
many logits matter, and they come sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(  # type: ignore[no-untyped-def]
    logits_ptr, best_ptr, noise_ptr, out_ptr, vocabulary, count, top_p,
    BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One row: which logits are likely enough, then the one with the largest share divided by its noise."""
    row = tl.program_id(0).to(tl.int64)
    at, within = tl.arange(0, COUNT), tl.arange(0, BLOCK)
    inside = at < count
    best = tl.load(best_ptr + row * count + at, mask=inside, other=-float("inf"))
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
        found = tl.where(here & (logits >= cutoff), tl.exp(logits - highest) / noise, -1.0)
        token = tl.where(found > value, place, token)
        value = tl.maximum(value, found)
    first = tl.min(tl.where(value == tl.max(value, 0), token, vocabulary), 0)
    tl.store(out_ptr + row, first.to(tl.int64))


def drawn_tokens(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """A token of each row of float32 logits, drawn as `torch.multinomial` draws one from their softmax.

    Of logits that are equal `top_p` keeps all or none: which of them transformers keeps is the sort's choice.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    best = torch.topk(logits, min(top_k, vocabulary)).values
    noise = torch.empty_like(logits).exponential_(1)
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    count = best.shape[1]
    _drawn[(rows,)](
        logits, best, noise, out, vocabulary, count, top_p,
        BLOCK=_BLOCK, COUNT=triton.next_power_of_2(count), num_warps=8,
    )  # fmt: skip
    return out
