"""Operators of attention that run as one kernel on a GPU, and elsewhere as PyTorch computes it.

No compiler takes them apart, and they hold for sizes that vary: nothing of them depends on how lengths are
aligned, as it does in PyTorch's own kernels for masks.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

SIZES = (16, 32, 64, 128, 256)  # features of a head that the kernels know


def has_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can run where a tensor is."""
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def has_kernels(query: torch.Tensor) -> bool:
    """Whether there are kernels for the heads of such queries."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and query.shape[-1] in SIZES and has_triton(query)


@torch.library.custom_op("intarsia::masked_attention", mutates_args=())
def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention with a mask, whose heads may share keys; a row that sees nothing gives zeros.

    With `is_causal`, later places are hidden too, so that a mask of padding stays one row for all queries.
    """
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if has_kernels(query):
        from intarsia.engines.triton_kernels.attention import masked_attention as kernel

        return kernel(_rows(query), _rows(key), _rows(value), mask, scale, is_causal)
    if is_causal:
        earlier = torch.ones(shape[2:], dtype=torch.bool, device=mask.device).tril()
        mask = mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, -torch.inf)
    made = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask.expand(shape), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return made.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("intarsia::token_attention", mutates_args=())
def token_attention(
    query: torch.Tensor,
    past_keys: torch.Tensor,
    past_values: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one token to what a cache holds, where it stands, and to itself.

    The mask is (rows or 1, 1, 1, places of the cache + 1).
    """
    if has_kernels(query):
        from intarsia.engines.triton_kernels.attention import token_attention as kernel

        past_keys, past_values, new_key, new_value = (
            _rows(x) for x in (past_keys, past_values, new_key, new_value)
        )
        return kernel(_rows(query), past_keys, past_values, new_key, new_value, mask.contiguous(), scale)
    keys, values = torch.cat([past_keys, new_key], 2), torch.cat([past_values, new_value], 2)
    made = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
    )
    return made.transpose(1, 2).contiguous().transpose(1, 2)


@masked_attention.register_fake
@token_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    """Both lay out heads innermost but one, as the next layer reads them."""
    return query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)


@torch.library.custom_op("intarsia::row_product", mutates_args=())
def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    gated: bool,
) -> torch.Tensor:
    """`linear` of one row, after an RMS norm with the weight `norm`, and with a residual added.

    With `gated` the weight's second half is gated by its first: `silu(first) * second`.
    """
    if x.is_cuda:
        from intarsia.engines.triton_kernels.products import row_product as kernel

        bias, norm, residual = (
            None if given is None else given.contiguous() for given in (bias, norm, residual)
        )
        return kernel(x.contiguous(), weight, bias, norm, residual, eps, gated)
    if norm is not None:
        wide = x.float()
        x = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    made = torch.nn.functional.linear(x, weight, bias)
    if gated:
        gate, up = made.chunk(2, -1)
        made = torch.nn.functional.silu(gate) * up
    return made if residual is None else made + residual


@row_product.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    gated: bool,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the features of a head next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
