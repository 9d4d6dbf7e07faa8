"""Normalisation by the root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intarsia.convert.aten.norm import ones
from intarsia.convert.aten.precision import filled, is_empty, used, wide
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.attributes import is_rounded

aten = torch.ops.aten


def _least(x: Tensor) -> float:
    """What is added where nothing is said: the rounding of the type it is computed in, float32 for halves."""
    return float(torch.finfo(dtypes.to_torch(x.dtype)).eps)


def _reciprocal(x: Tensor, sizes: Sequence[int], eps: float) -> Tensor:
    """One by the root of the mean square over the last dimensions, which are kept."""
    axes = list(range(x.ndim - len(sizes), x.ndim))
    return F.reciprocal(F.sqrt(F.add(F.reduce_mean(F.mul(x, x), axes), eps)))


def _rms_norm(input: Tensor, sizes: Sequence[int], weight: Any, eps: float | None) -> Tensor:
    x = wide(input, halves=True)
    eps = _least(x) if eps is None else eps
    scale = ones(sizes, x.dtype) if weight is None else F.cast(weight, x.dtype)
    if is_rounded(eps, x.dtype):
        return F.mul(F.mul(x, _reciprocal(x, sizes, eps)), scale)
    return F.cast(F.rms_norm(x, scale, axis=-len(sizes), epsilon=eps), input.dtype)


@converter(aten.rms_norm.default)
def rms_norm(
    ctx: ConversionContext,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return filled(ctx) if is_empty(input) else _rms_norm(input, normalized_shape, weight, eps)


@converter(aten._fused_rms_norm.default)
def fused_rms_norm(
    ctx: ConversionContext,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor | None]:
    if is_empty(input):
        return filled(ctx, output=0), filled(ctx, output=1)
    made = _rms_norm(input, normalized_shape, weight, eps)
    if not used(ctx.node, 1):
        return made, None
    x = wide(input, halves=True)
    rstd = _reciprocal(x, normalized_shape, _least(x) if eps is None else eps)
    return made, F.cast(rstd, ctx.value[1].dtype)
