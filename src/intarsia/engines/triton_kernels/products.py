"""A Triton kernel of products of one row, with the norm before and the gate or sum after it.

Imported on a GPU only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # elements of the weight that a program of four warps asks for at once


@triton.jit  # type: ignore[untyped-decorator]
def _row_product(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, outputs, eps,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight, each whole: it is asked for first, since it is what takes the time."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < outputs
    within = tl.arange(0, BLOCK)
    inside = within < INNER
    pairs = real[:, None] & inside[None]
    at = rows[:, None].to(tl.int64) * INNER + within[None]
    w = tl.load(w_ptr + at, mask=pairs, other=0.0)
    if IS_GATED:
        other = tl.load(w_ptr + at + outputs.to(tl.int64) * INNER, mask=pairs, other=0.0)
    x = tl.load(x_ptr + within, mask=inside, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if HAS_NORM:  # rounded where the model rounds
        factor = tl.math.rsqrt(tl.sum(wide * wide, 0) / INNER + eps)
        norm = tl.load(norm_ptr + within, mask=inside, other=0.0).to(tl.float32)
        wide = ((wide * factor).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * wide[None], 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=real, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if IS_GATED:
        gated = tl.sum(other.to(tl.float32) * wide[None], 1)
        if HAS_BIAS:
            gated += tl.load(bias_ptr + outputs + rows, mask=real, other=0.0).to(tl.float32)
        total = (total * tl.sigmoid(total)).to(dtype).to(tl.float32) * gated.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + rows, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, total.to(dtype), mask=real)


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    gated: bool,
) -> torch.Tensor:
    """See the operator."""
    inner, outputs = x.shape[-1], weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(*x.shape[:-1], outputs)
    block = triton.next_power_of_2(inner)
    rows = max(1, _TILE // block // (2 if gated else 1))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    while rows > 1 and triton.cdiv(outputs, rows) < 2 * processors:
        rows //= 2
    _row_product[(triton.cdiv(outputs, rows),)](
        x, weight, *(x if given is None else given for given in (bias, norm, residual)), out, outputs, eps,
        INNER=inner, BLOCK=block, ROWS=rows,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        IS_GATED=gated, num_warps=4 if block <= 2 * _TILE else 8,
    )  # fmt: skip
    return out
