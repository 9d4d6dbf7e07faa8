"""Elements and rows written or reduced at indices: scatter, index_add, embedding_bag."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.indexing import cropped, wrapped
from intarsia.convert.aten.kernels import from_the_front, left_where, with_further, zero_unless
from intarsia.convert.aten.sizes import END, Size, arange, int64, reshape, result_shape, size, sizes, wrap
from intarsia.convert.aten.view import expanded
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType

_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1}
_LAYER = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


_OLD_NAMES = {"add": "sum", "multiply": "prod"}


@converter(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
    aten.scatter_add.default,
)
def scatter(
    ctx: Context,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | None = None,
    value: float = 0,
    *,
    reduce: str | None = None,
    include_self: bool = True,
) -> Tensor:
    if 0 in index.shape:
        return self  # nothing is written, whatever the ranks
    x, source = self, F.constant(value, self.dtype) if src is None else src
    name = "sum" if ctx.operator == "scatter_add" else _OLD_NAMES.get(reduce or "", reduce)
    if x.ndim == 0 or index.ndim == 0:
        x, index, source = (F.reshape(t, [-1]) for t in (x, index, source))
    axis = wrap(dim, x.ndim)
    index = from_the_front(index, size(x, axis))
    source = expanded(source, sizes(index), index.shape) if source.ndim == 0 else cropped(source, index)
    result = reduced(x, index, source, axis, name, include_self)
    return reshape(result, [], ()) if result_shape(ctx) == () else result


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
    result = F.scatter_elements(base, index, added, axis, reduction=_LAYER[reduce])
    if reduce == "mean":
        result = _mean(result, index, axis, include_self)
    if reduce in ("amax", "amin") and wide in dtypes.FLOATS:
        result = _with_nan(result, base, added, index, axis)
    return F.cast(result, x.dtype)


def neutral_element(reduce: str, dtype: ir.DataType) -> Any:
    """The start value of a reduction."""
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


def _with_nan(output: Tensor, base: Tensor, added: Tensor, index: Tensor, axis: int) -> Tensor:
    # torch's largest and smallest of anything with a NaN is NaN; engines skip some of them.
    before, after = (F.cast(F.isnan(t), D.FLOAT) for t in (base, added))
    tainted = F.greater(F.scatter_elements(before, index, after, axis, reduction="add"), 0.0)
    return F.where(tainted, F.constant(np.nan, output.dtype), output)


# Slices written or reduced at the numbers of a vector: index_add, index_copy, index_fill.


@converter(aten.index_add.default)
def index_add(
    ctx: Context, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    wide = kernels.accumulator(self.dtype)
    scaled = source if alpha == 1 else F.mul(F.cast(source, wide), F.constant(alpha, wide))
    return _rows(F.cast(self, wide), dim, index, F.cast(scaled, wide), "sum", dtype=self.dtype)


@converter(aten.index_copy.default)
def index_copy(ctx: Context, self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _rows(self, dim, index, source, None)


@converter(aten.index_reduce.default)
def index_reduce(
    ctx: Context,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    if self.dtype in (D.FLOAT16, D.BFLOAT16) and reduce in ("mean", "prod"):
        raise ConversionError(
            f"reduce={reduce!r} in {self.dtype.name}, which torch rounds at each step, is not handled"
        )
    return _rows(self, dim, index, source, reduce, include_self)


@converter(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Context, self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    x = self if self.ndim else F.reshape(self, [1])
    axis, line = wrap(dim, x.ndim), F.reshape(index, [-1])
    known = tuple(line.shape[0] if i == axis else d for i, d in enumerate(x.shape))
    wanted: list[Size] = [size(line, 0) if i == axis else size(x, i) for i in range(x.ndim)]
    fill = expanded(ctx.tensor(value, x.dtype), wanted, known)
    result = _rows(x, axis, wrapped(line, size(x, axis)), fill, None)  # negative numbers count from the end
    return result if self.ndim else F.reshape(result, [])


def _rows(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str | None,
    include_self: bool = True,
    dtype: ir.DataType | None = None,
) -> Tensor:
    """`x` with slices of `source` written or reduced at the numbers of a vector."""
    wanted = x.dtype if dtype is None else dtype
    if x.ndim == 0:
        line = F.reshape(x, [1])
        flat = _rows(line, 0, F.reshape(index, [-1]), F.reshape(source, [-1]), reduce, include_self)
        return F.cast(F.reshape(flat, []), wanted)
    axis = wrap(dim, x.ndim)
    if 0 in source.shape:
        return F.cast(x, wanted)
    source = F.unsqueeze(source, list(range(x.ndim))) if source.ndim == 0 else source
    line = F.reshape(from_the_front(index, size(x, axis)), [-1 if i == axis else 1 for i in range(x.ndim)])
    places = expanded(line, sizes(source), source.shape)
    return F.cast(reduced(x, places, source, axis, reduce, include_self), wanted)


# Rows of a table looked up and reduced bag by bag.

_REDUCE = ("sum", "mean", "amax")


@converter(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: Context,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    wide = kernels.accumulator(weight.dtype)
    indices = from_the_front(indices, size(weight, 0))
    rows = F.cast(F.gather(weight, indices, 0), wide)
    if per_sample_weights is not None:
        rows = F.mul(rows, F.unsqueeze(F.cast(per_sample_weights, wide), [1]))
    unlike = _unlike_offsets(offsets, size(indices, 0))
    if include_last_offset:  # what comes after the last one is in a bag or in none, as torch's modes differ
        ends = F.equal(F.slice(F.cast(offsets, D.INT64), -1, END, axis=0), int64(size(indices, 0)))
        unlike = F.logical_or(unlike, F.logical_not(ends))
    bag = F.add(_bag_of(indices, offsets), zero_unless(unlike))
    count: Size = size(offsets, 0)
    if padding_idx >= 0:
        # What pads goes to a bag after the last one.
        pads = F.equal(indices, F.constant(padding_idx, D.INT64))
        bag = F.where(pads, F.constant(count) if isinstance(count, int) else count, bag)
    result = _reduced(rows, bag, count, _REDUCE[mode])
    bags = F.slice(result, 0, count - 1 if include_last_offset else count, axis=0)
    return with_further(ctx, F.cast(bags, weight.dtype))


def _unlike_offsets(offsets: Tensor, count: Size) -> Tensor:
    """Where offsets do not rise from 0 to at most the number of indices; torch refuses most of these."""
    begins = F.cast(offsets, D.INT64)
    before = F.concat([F.constant(np.zeros(1, np.int64)), F.slice(begins, 0, -1, axis=0)], 0)
    starts = F.concat([F.constant(np.ones(1, np.bool_)), F.less(F.slice(begins, 1, END, axis=0), 0)], 0)
    late = F.logical_and(starts, F.logical_not(F.equal(begins, 0)))
    return F.logical_or(F.logical_or(F.less(begins, before), F.less(int64(count), begins)), late)


def _bag_of(indices: Tensor, offsets: Tensor) -> Tensor:
    """The bag of every place: how many bags have begun there, less one."""
    place = F.unsqueeze(arange(size(indices, 0)), [1])
    begun = F.less_equal(F.unsqueeze(F.cast(offsets, D.INT64), [0]), place)
    return F.sub(F.reduce_sum(F.cast(begun, D.INT64), [1], keepdims=False), 1)


def _reduced(rows: Tensor, bag: Tensor, count: Size, reduce: str) -> Tensor:
    width = size(rows, 1)
    start = F.constant(neutral_element(reduce, rows.dtype), rows.dtype)
    base = expanded(start, [count + 1, width], (count + 1 if isinstance(count, int) else None, rows.shape[1]))
    places = expanded(F.unsqueeze(bag, [1]), sizes(rows), rows.shape)
    result = reduced(base, places, rows, 0, "amax" if reduce == "amax" else "sum")
    if reduce == "sum":
        return result
    if reduce == "amax":
        result = left_where(result, F.isnan(result))  # torch keeps it only where it comes first
    ones = expanded(F.constant(1, rows.dtype), sizes(bag), bag.shape)
    none = expanded(F.constant(0, rows.dtype), [count + 1], (count + 1 if isinstance(count, int) else None,))
    held = F.unsqueeze(F.scatter_elements(none, bag, ones, 0, reduction="add"), [1])
    if reduce == "mean":
        return F.div(result, F.maximum(held, F.constant(1, rows.dtype)))
    return F.where(F.equal(held, 0), F.constant(0, rows.dtype), result)
