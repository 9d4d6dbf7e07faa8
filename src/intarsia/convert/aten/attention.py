"""Scaled dot-product attention, as one layer if that layer computes the same as torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import filled, is_empty, on_cpu, used, wide, with_further, zero_unless
from intarsia.convert.aten.reduce import holds_everywhere
from intarsia.convert.aten.sizes import size
from intarsia.convert.context import HALVES, Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Dim, Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.value import broadcast, product

aten = torch.ops.aten


def attend(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention over any number of leading dimensions; fewer heads of key and value are shared."""
    if is_empty(query, key, value):
        return filled(ctx, output=0 if isinstance(ctx.value, tuple) else None)
    # ONNX Runtime's CPU kernel for float16 also sums in float16: a twentieth off where torch is exact.
    halves = on_cpu(ctx)
    q, k, v = (wide(x, halves=halves) for x in (query, key, value))
    if mask is not None and mask.dtype != ir.DataType.BOOL:
        mask = F.cast(mask, q.dtype)
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v, mask = _four(q, k, v, mask)
    if mask is not None:
        mask = _full_mask(mask, q, k)
    if q.dtype == ir.DataType.DOUBLE or (scale is not None and scale <= 0):
        # The layer is for floats and positive scales.
        result = fragments(q, k, _without_infinities(q, k, v), mask, causal, scale)[0]
    else:
        result = F.attention(q, k, v, mask, scale=scale, is_causal=causal)
    return F.cast(_restore(ctx, result, rank), query.dtype)


def _result(ctx: Context) -> torch.Tensor:
    value: torch.Tensor = ctx.value[0] if isinstance(ctx.value, tuple | list) else ctx.value
    return value


def _four(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """Operands as (batch, heads, length, width)."""
    rank = max(q.ndim, k.ndim, v.ndim)
    leading = [tensor.shape[:-2] for tensor in (q, k, v)]
    if rank == 4 and q.ndim == k.ndim == v.ndim and _known_equal(q.shape[0], k.shape[0], v.shape[0]):
        return q, k, v, mask
    if rank <= 3 and leading[0] == leading[1] == leading[2]:
        front = list(range(4 - rank)) if rank < 3 else [1]
        if mask is not None and mask.ndim == 3:
            mask = F.unsqueeze(mask, [1])
        return *(F.unsqueeze(tensor, front) for tensor in (q, k, v)), mask
    batch = broadcast(*leading)
    if not all(isinstance(extent, int) for extent in batch):
        raise ConversionError(f"attention over broadcast dimensions {batch} is not handled")
    flat = [_flatten(tensor, batch) for tensor in (q, k, v)]
    return *flat, None if mask is None else _flatten(mask, batch)


def _known_equal(*sizes: Dim) -> bool:
    return sizes[0] is not None and all(size == sizes[0] for size in sizes)


def _flatten(x: Tensor, batch: tuple[Dim, ...]) -> Tensor:
    """`x` broadcast to these leading sizes, which become one, with a single head each."""
    tail = [size(x, -2), size(x, -1)]
    whole = F.expand(x, [*batch, *tail]) if x.shape[:-2] != batch else x  # type: ignore[list-item]
    return F.reshape(whole, [product(batch), 1, *tail])  # type: ignore[list-item]


def _restore(ctx: Context, output: Tensor, rank: int) -> Tensor:
    result = _result(ctx)
    if rank == 3 and output.shape[1] == 1 and result.ndim == 3:
        return F.squeeze(output, [1])
    if rank == 2:
        return F.squeeze(output, [0, 1])
    sizes = [extent if isinstance(extent, int) else None for extent in result.shape]
    if rank == 4 and (None in sizes or list(output.shape) == sizes):
        return output
    if None in sizes:
        raise ConversionError(f"attention over {rank} dimensions of unknown size is not handled")
    return F.reshape(output, sizes)


def _full_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask with its last two dimensions spelled out, which ONNX Runtime wants."""
    lengths = (q.shape[-2], k.shape[-2])
    if mask.ndim < 2 or mask.shape[-2:] != lengths:
        mask = F.expand(mask, [*[1] * (mask.ndim - 2), size(q, -2), size(k, -2)])
    if mask.dtype == ir.DataType.BOOL:
        return mask
    # ONNX Runtime takes a row of lowest numbers for one that is masked out (all zeros); torch averages.
    lowest = torch.finfo(dtypes.to_torch(mask.dtype)).min
    return F.where(F.equal(mask, lowest), lowest / 2, mask)


def fragments(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result and the weights, as separate layers; a fully masked row has weights of 0."""
    width = q.shape[-1]
    if scale is None:
        if not isinstance(width, int):
            raise ConversionError("attention over heads of unknown width is not handled")
        scale = width**-0.5
    heads, shared = q.shape[1], k.shape[1]
    if heads != shared:
        k, v = (_repeat(x, heads, shared) for x in (k, v))
    scores = F.mul(F.matmul(q, F.transpose(k, (0, 1, 3, 2))), scale)
    if causal:
        ones = F.expand(F.constant(True), [size(q, -2), size(k, -2)])
        mask = F.cast(F.trilu(F.cast(ones, ir.DataType.INT64), upper=False), ir.DataType.BOOL)
    if mask is not None:
        hidden = F.where(mask, scores, -torch.inf) if mask.dtype == ir.DataType.BOOL else F.add(scores, mask)
        weights = F.softmax(hidden)
        weights = F.where(holds_everywhere(F.equal(hidden, -torch.inf), [-1], True), 0.0, weights)
    else:
        weights = F.softmax(scores)
    return F.matmul(weights, v), weights


def _without_infinities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`v`; calls whose scores might be NaN or infinite are left to PyTorch, whose kernel puts 0 there."""
    most = 2.0**500 if q.dtype == ir.DataType.DOUBLE else 2.0**60  # products of such stay finite
    for x, limit in ((q, most), (k, most), (v, torch.inf)):
        v = F.add(v, F.cast(zero_unless(F.logical_not(F.less(F.abs(x), limit))), v.dtype))
    return v


def _repeat(x: Tensor, heads: Dim, shared: Dim) -> Tensor:
    if not isinstance(heads, int) or not isinstance(shared, int):
        raise ConversionError(f"{heads} heads sharing {shared} of key and value are not handled")
    return F.gather(x, np.arange(heads) // (heads // shared), axis=1)


@converter(aten.scaled_dot_product_attention.default, aten._scaled_dot_product_attention_math.default)
def scaled_dot_product_attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The result; and, of the second operator, the weights."""
    has_weights = isinstance(ctx.value, tuple | list)
    if not has_weights or not used(ctx.node, 1):
        result = attend(ctx, query, key, value, attn_mask, is_causal, scale)
        return (result, None) if has_weights else result
    if query.ndim != 4 or is_empty(query, key, value):
        raise ConversionError(f"attention weights over {query.ndim} dimensions are not handled")
    half = query.dtype in HALVES
    q, k, v = (wide(x, halves=half) for x in (query, key, value))
    mask = (
        attn_mask
        if attn_mask is None or attn_mask.dtype == ir.DataType.BOOL
        else wide(attn_mask, halves=half)
    )
    result, weights = fragments(q, k, v, mask, is_causal, scale)
    return F.cast(result, query.dtype), F.cast(weights, query.dtype)


@converter(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def fused_attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    compute_log_sumexp: bool = False,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    mask = attn_bias if attn_mask is None else attn_mask
    return with_further(ctx, attend(ctx, query, key, value, mask, is_causal, scale))
