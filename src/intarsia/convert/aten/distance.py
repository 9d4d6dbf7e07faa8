"""Distances between rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from intarsia.convert.aten.creation import filled_like
from intarsia.convert.aten.demands import left_where
from intarsia.convert.aten.indexing import places
from intarsia.convert.aten.precision import filled, is_empty, wide
from intarsia.convert.aten.reduce import largest
from intarsia.convert.aten.sizes import arange, size
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def _length(difference: Tensor, p: float) -> Tensor:
    """The p-norm over the last dimension."""
    x = F.abs(difference)
    if p == 0:
        counted = F.cast(F.logical_not(F.equal(x, 0.0)), x.dtype)
        return F.reduce_sum(F.where(F.isnan(x), x, counted), [-1], keepdims=False)
    if p == 1:
        return F.reduce_sum(x, [-1], keepdims=False)
    if p == 2:
        return F.reduce_l2(x, [-1], keepdims=False)
    if math.isinf(p):
        made = largest(x, [-1], keepdims=False)
        return left_where(made, F.isnan(made))  # eager passes over NaN at some sizes
    return F.pow(F.reduce_sum(F.pow(x, float(p)), [-1], keepdims=False), 1 / p)


def _by_product(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distances as `|a|^2 + |b|^2 - 2 a.b`, in one product as torch computes them.

    Less exact where distances are small, so the order of operations has to be torch's own.
    """
    squares_a, squares_b = (F.reduce_sum(F.mul(x, x), [-1]) for x in (a, b))
    one_a, one_b = (filled_like(x, 1, x.dtype) for x in (squares_a, squares_b))
    left = F.concat([F.mul(a, -2.0), squares_a, one_a], -1)
    right = F.concat([b, one_b, squares_b], -1)
    order = [*range(b.ndim - 2), b.ndim - 1, b.ndim - 2]
    made = F.matmul(left, F.transpose(right, order))
    return F.sqrt(F.where(F.less(made, 0.0), F.constant(0.0, made.dtype), made))  # NaN stays


@converter(aten.cdist.default, aten._cdist_forward.default)
def cdist(ctx: ConversionContext, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    if is_empty(x1, x2):
        return filled(ctx)
    a, b = wide(x1, halves=True), wide(x2, halves=True)
    rows = (x1.shape[-2], x2.shape[-2])
    # torch: None and 0 take the product when either side has more than 25 rows, 1 always, 2 never
    many = any(not isinstance(size, int) or size > 25 for size in rows)
    if p == 2 and (compute_mode == 1 or (compute_mode in (None, 0) and many)):
        return F.cast(_by_product(a, b), ctx.dtype)
    return F.cast(_length(F.sub(F.unsqueeze(a, [-2]), F.unsqueeze(b, [-3])), p), ctx.dtype)


@converter(aten._euclidean_dist.default)
def euclidean_dist(ctx: ConversionContext, x1: Tensor, x2: Tensor) -> Tensor:
    if is_empty(x1, x2):
        return filled(ctx)
    return F.cast(_by_product(wide(x1, halves=True), wide(x2, halves=True)), ctx.dtype)


@converter(aten.pdist.default, aten._pdist_forward.default)
def pdist(ctx: ConversionContext, self: Tensor, p: float = 2.0) -> Tensor:
    rows = self.shape[0]
    if (isinstance(rows, int) and rows < 2) or is_empty(self):
        return filled(ctx)
    if isinstance(rows, int):
        first, second = (F.constant(line) for line in np.triu_indices(rows, 1))
    else:
        line = arange(size(self, 0))
        first, second = places(F.less(F.unsqueeze(line, [1]), F.unsqueeze(line, [0])))
    x = wide(self, halves=True)
    return F.cast(_length(F.sub(F.gather(x, first), F.gather(x, second)), p), ctx.dtype)
