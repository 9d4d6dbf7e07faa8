"""Elements written or reduced into a tensor by number: scatter in its kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.demands import from_the_front
from intarsia.convert.aten.expand import expanded
from intarsia.convert.aten.gather import cropped
from intarsia.convert.aten.sizes import reshape, result_shape, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType
_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1}
_LAYER = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


@converter(aten.scatter.src)
def scatter_src(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _written(ctx, self, dim, index, src)


@converter(aten.scatter.value)
def scatter_value(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return _written(ctx, self, dim, index, F.constant(value, self.dtype))


@converter(aten.scatter.reduce)
def scatter_reduce_old(
    ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str
) -> Tensor:
    return _written(ctx, self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@converter(aten.scatter.value_reduce)
def scatter_value_reduce(
    ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, value: float, *, reduce: str
) -> Tensor:
    value_ = F.constant(value, self.dtype)
    return _written(ctx, self, dim, index, value_, {"add": "sum", "multiply": "prod"}[reduce])


@converter(aten.scatter_add.default)
def scatter_add(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _written(ctx, self, dim, index, src, "sum")


@converter(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: ConversionContext,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    return _written(ctx, self, dim, index, src, reduce, include_self)


def _written(
    ctx: ConversionContext,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str | None = None,
    include_self: bool = True,
) -> Tensor:
    if index.shape == (0,) or 0 in index.shape:
        return x  # nothing is written, whatever the ranks
    if x.ndim == 0 or index.ndim == 0:
        x, index, source = (F.reshape(t, [-1]) for t in (x, index, source))
    axis = wrap(dim, x.ndim)
    index = from_the_front(index, size(x, axis))
    source = expanded(source, sizes(index), index.shape) if source.ndim == 0 else cropped(source, index)
    made = reduced(x, index, source, axis, reduce, include_self)
    return reshape(made, [], ()) if result_shape(ctx) == () else made


def reduced(
    x: Tensor, index: Tensor, source: Tensor, axis: int, reduce: str | None, include_self: bool = True
) -> Tensor:
    """`x` with `source` (in the shape of `index`) written along an axis, or reduced into what is there."""
    if reduce is None:
        return F.scatter_elements(x, index, source, axis)
    wide = kernels.accumulator(x.dtype)
    base, added = F.cast(x, wide), F.cast(source, wide)
    if not include_self:
        # The largest of some elements and one of them is the largest, so any of them is a start.
        neutral = None if reduce in ("amax", "amin") else F.constant(neutral_element(reduce, wide), wide)
        start = added if neutral is None else expanded(neutral, sizes(index), index.shape)
        base = F.scatter_elements(base, index, start, axis)
    made = F.scatter_elements(base, index, added, axis, reduction=_LAYER[reduce])
    if reduce == "mean":
        made = _mean(made, index, axis, include_self)
    if reduce in ("amax", "amin") and wide in dtypes.FLOATS:
        made = _with_nan(made, base, added, index, axis)
    return F.cast(made, x.dtype)


def neutral_element(reduce: str, dtype: ir.DataType) -> Any:
    """What a reduction starts from."""
    if reduce in _NEUTRAL:
        return _NEUTRAL[reduce]
    if reduce not in ("amax", "amin"):
        raise ConversionError(f"reduce={reduce!r} is not handled")
    if dtype in dtypes.FLOATS:
        return -np.inf if reduce == "amax" else np.inf
    info = np.iinfo(dtypes.to_numpy(dtype))
    return info.min if reduce == "amax" else info.max


def _mean(total: Tensor, index: Tensor, axis: int, include_self: bool) -> Tensor:
    ones = expanded(F.constant(1, total.dtype), sizes(index), index.shape)
    start = expanded(F.constant(1 if include_self else 0, total.dtype), sizes(total), total.shape)
    count = F.scatter_elements(start, index, ones, axis, reduction="add")
    count = F.maximum(count, F.constant(1, total.dtype))
    if total.dtype in dtypes.FLOATS:
        return F.div(total, count)
    # torch divides integers downwards, ONNX towards zero.
    quotient = F.div(total, count)
    low = F.logical_and(F.less(total, 0), F.logical_not(F.equal(F.mul(quotient, count), total)))
    return F.sub(quotient, F.cast(low, total.dtype))


def _with_nan(made: Tensor, base: Tensor, added: Tensor, index: Tensor, axis: int) -> Tensor:
    # torch's largest and smallest of anything with a NaN is NaN; engines skip some of them.
    before, after = (F.cast(F.isnan(t), D.FLOAT) for t in (base, added))
    tainted = F.greater(F.scatter_elements(before, index, after, axis, reduction="add"), 0.0)
    return F.where(tainted, F.constant(np.nan, made.dtype), made)
