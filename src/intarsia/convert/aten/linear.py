"""Products of vectors and matrices, and distances between rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from intarsia.convert.aten.creation import filled_like
from intarsia.convert.aten.indexing import places
from intarsia.convert.aten.kernels import (
    filled,
    is_empty,
    is_float,
    left_where,
    on_cpu,
    summed_up,
    whole,
    wide,
)
from intarsia.convert.aten.reduce import largest
from intarsia.convert.aten.sizes import arange, size
from intarsia.convert.context import HALVES, Context
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.network.attributes import is_rounded
from intarsia.network.value import broadcast

aten = torch.ops.aten

_ROUNDED = 32  # products added one by one, as torch does; more would make the network long


def product(a: Tensor, b: Tensor, *, halves: bool = False) -> Tensor:
    """`a @ b` in the dtype torch accumulates in."""
    left, right = wide(a, halves=halves), wide(b, halves=halves)
    if not is_empty(left, right):
        return F.matmul(left, right)
    # A product over nothing is zero; kernels disagree about it.
    batch = broadcast(left.shape[:-2], right.shape[:-2])
    sizes = (*batch, *left.shape[-2:-1], *(right.shape[-1:] if right.ndim > 1 else ()))
    return F.full(whole(list(sizes), "a size"), 0, left.dtype)


def _scaled(x: Tensor, factor: Any) -> Tensor:
    return x if factor == 1 else F.mul(x, factor)


def _plus(ctx: Context, result: Tensor, self: Tensor, beta: Any, alpha: Any) -> Tensor:
    """`beta * self + alpha * made`; with beta 0 torch ignores the values of self."""
    result = _scaled(result, alpha)
    if beta != 0:
        result = F.add(_scaled(F.cast(self, result.dtype), beta), result)
    return F.cast(result, ctx.dtype)


@converter(aten.linear.default)
def linear(ctx: Context, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.ndim != 2 or not is_float(input) or is_empty(input, weight):
        turned = F.transpose(weight, (1, 0)) if weight.ndim == 2 else weight
        result = product(input, turned)
        return F.cast(result if bias is None else F.add(result, wide(bias)), ctx.dtype)
    # Gemm reads the weight as torch keeps it; a transpose would copy it.
    x, columns = wide(input), weight.shape[0]
    width: Any = weight.shape[1]
    rows = x if x.ndim == 2 else F.reshape(x, [-1, width])
    result = F.gemm(rows, wide(weight), None if bias is None else wide(bias), trans_b=True)
    if x.ndim != 2:
        result = _restore(result, x, columns)
    return F.cast(result, ctx.dtype)


def _restore(output: Tensor, x: Tensor, columns: Any) -> Tensor:
    sizes: list[Any] = list(x.shape[:-1])
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) <= 1:
        return F.reshape(output, [*(-1 if i in unknown else d for i, d in enumerate(sizes)), columns])
    return F.reshape(output, F.concat([F.op("Shape", x, end=-1), F.ints([columns])], 0))


@converter(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def matmul(ctx: Context, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
    """The names of the second operand differ among these operators."""
    a, b = (ctx.tensor(operand) for operand in (*args, *kwargs.values()))
    return F.cast(product(a, b), ctx.dtype)


@converter(aten.addmm.default)
def addmm(ctx: Context, self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    rounded = any(is_rounded(factor, mat1.dtype) for factor in (alpha, beta))
    if not is_float(mat1) or is_empty(mat1, mat2) or rounded:
        return _plus(ctx, product(mat1, mat2), self, beta, alpha)
    bias = None if beta == 0 else wide(self)
    return F.cast(F.gemm(wide(mat1), wide(mat2), bias, alpha=alpha, beta=beta), ctx.dtype)


@converter(aten.baddbmm.default)
def baddbmm(
    ctx: Context, self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    return _plus(ctx, product(batch1, batch2, halves=on_cpu(ctx)), self, beta, alpha)


@converter(aten.addbmm.default)
def addbmm(
    ctx: Context, self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    if is_empty(batch1, batch2):
        return _plus(ctx, wide(filled(ctx)), self, beta, alpha)
    result = product(batch1, batch2, halves=on_cpu(ctx))
    count = batch1.shape[0]
    if self.dtype in HALVES and isinstance(count, int) and count <= _ROUNDED:
        for i in range(count):  # torch adds one product after the other and rounds each time
            self = _plus(ctx, F.gather(result, i), self, beta if i == 0 else 1, alpha)
        return self
    summed = summed_up(result, [0])
    return _plus(ctx, summed, self, beta, alpha)


@converter(aten.addmv.default)
def addmv(ctx: Context, self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _plus(ctx, product(mat, vec, halves=on_cpu(ctx)), self, beta, alpha)


@converter(aten.bilinear.default)
def bilinear(
    ctx: Context, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if is_empty(input1, input2, weight):
        return filled(ctx) if bias is None else F.expand(bias, whole(list(ctx.value.shape), "a size"))
    # (..., 1, i) @ (k, i, j) -> (..., k, 1, j), times (..., 1, 1, j) summed over j
    rows = F.unsqueeze(wide(input1), [-2, -3]) if input1.ndim else wide(input1)
    result = F.mul(F.matmul(rows, wide(weight)), F.unsqueeze(wide(input2), [-2, -3]))
    summed = summed_up(result, [result.ndim - 2, result.ndim - 1])
    return F.cast(summed if bias is None else F.add(summed, wide(bias)), ctx.dtype)


# Distances between rows.


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
        result = largest(x, [-1], keepdims=False)
        return left_where(result, F.isnan(result))  # eager passes over NaN at some sizes
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
    result = F.matmul(left, F.transpose(right, order))
    return F.sqrt(F.where(F.less(result, 0.0), F.constant(0.0, result.dtype), result))  # NaN stays


@converter(aten.cdist.default, aten._cdist_forward.default)
def cdist(ctx: Context, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
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
def euclidean_dist(ctx: Context, x1: Tensor, x2: Tensor) -> Tensor:
    return cdist(ctx, x1, x2, compute_mode=1)


@converter(aten.pdist.default, aten._pdist_forward.default)
def pdist(ctx: Context, self: Tensor, p: float = 2.0) -> Tensor:
    rows = self.shape[0]
    if is_empty(self):
        return filled(ctx)
    if isinstance(rows, int):
        first, second = (F.constant(line) for line in np.triu_indices(rows, 1))
    else:
        line = arange(size(self, 0))
        first, second = places(F.less(F.unsqueeze(line, [1]), F.unsqueeze(line, [0])))
    x = wide(self, halves=True)
    return F.cast(_length(F.sub(F.gather(x, first), F.gather(x, second)), p), ctx.dtype)
