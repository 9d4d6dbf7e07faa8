"""A Triton kernel that copies rows which end in padding to rows without. Imported on a GPU only.

A product whose rows are not a multiple of 16 bytes, such as the logits of GPT-2's 50257 words, is written to
padded rows. PyTorch copies them element by element (GPT-2, batch 32, H200: 0.47 ms, here 0.22).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _rows(from_ptr, to_ptr, total, width, padding, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of the results, which is aligned for wide stores. It holds parts of one or two rows."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    within = tl.arange(0, BLOCK)
    row = start // width
    is_next = start - row * width + within >= width
    inside = start + within < total
    values = tl.load(from_ptr + start + within + (row + is_next) * padding, mask=inside)
    tl.store(to_ptr + start + within, values, mask=inside)


def has_padded_rows(x: torch.Tensor) -> bool:
    """Whether all rows of a tensor are long and have the same distance, which is larger than a row."""
    distance = x.stride(-2) if x.dim() > 1 else 0
    if x.stride(-1) != 1 or x.shape[-1] < _BLOCK or distance <= x.shape[-1]:
        return False
    return all(x.stride(axis) == distance * math.prod(x.shape[axis + 1 : -1]) for axis in range(-x.dim(), -2))


def copy_rows(to: torch.Tensor, x: torch.Tensor) -> None:
    """Copy a tensor with padded rows to a contiguous one."""
    width, total = x.shape[-1], x.numel()
    _rows[(triton.cdiv(total, _BLOCK),)](x, to, total, width, x.stride(-2) - width, BLOCK=_BLOCK)
