"""Rows of a table looked up and reduced bag by bag."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.demands import from_the_front, left_where, zero_unless
from intarsia.convert.aten.expand import expanded
from intarsia.convert.aten.precision import used
from intarsia.convert.aten.scatter import neutral_element, reduced
from intarsia.convert.aten.sizes import END, Size, arange, int64, size, sizes
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType
_REDUCE = ("sum", "mean", "amax")
Bags = Sequence[Tensor | None]


@converter(aten.embedding_bag.default)
def embedding_bag(
    ctx: ConversionContext,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
) -> Bags:
    return _bags(ctx, weight, indices, offsets, mode, per_sample_weights, include_last_offset, None)


@converter(aten.embedding_bag.padding_idx)
def embedding_bag_padded(
    ctx: ConversionContext,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Bags:
    if padding_idx is not None and padding_idx < 0:
        rows = weight.shape[0]
        if not isinstance(rows, int):
            raise ConversionError(f"padding_idx={padding_idx} of a table of unknown length is not handled")
        padding_idx += rows
    return _bags(ctx, weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx)


@converter(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def core_embedding_bag(
    ctx: ConversionContext,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Bags:
    absent = None if padding_idx < 0 else padding_idx
    return _bags(ctx, weight, indices, offsets, mode, per_sample_weights, include_last_offset, absent)


def _bags(
    ctx: ConversionContext,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    weights: Tensor | None,
    include_last: bool,
    padding: int | None,
) -> Bags:
    for output in (1, 2, 3):
        if used(ctx.node, output):
            raise ConversionError(f"result {output} of embedding_bag, meant for gradients, is not handled")
    wide = kernels.accumulator(weight.dtype)
    indices = from_the_front(indices, size(weight, 0))
    rows = F.cast(F.gather(weight, indices, 0), wide)
    if weights is not None:
        rows = F.mul(rows, F.unsqueeze(F.cast(weights, wide), [1]))
    unlike = _unlike_offsets(offsets, size(indices, 0))
    if include_last:  # what comes behind the last one is in a bag or in none, as torch's modes differ
        ends = F.equal(F.slice(F.cast(offsets, D.INT64), -1, END, axis=0), int64(size(indices, 0)))
        unlike = F.logical_or(unlike, F.logical_not(ends))
    bag = F.add(_bag_of(indices, offsets), zero_unless(unlike))
    count: Size = size(offsets, 0)
    if padding is not None:
        # What pads goes to a bag behind the last one.
        pads = F.equal(indices, F.constant(padding, D.INT64))
        bag = F.where(pads, F.constant(count) if isinstance(count, int) else count, bag)
    made = _reduced(rows, bag, count, _REDUCE[mode])
    return (
        F.cast(F.slice(made, 0, count - 1 if include_last else count, axis=0), weight.dtype),
        None,
        None,
        None,
    )


def _unlike_offsets(offsets: Tensor, count: Size) -> Tensor:
    """Where offsets do not rise from 0 to at most the number of indices; torch refuses most of that."""
    given = F.cast(offsets, D.INT64)
    before = F.concat([F.constant(np.zeros(1, np.int64)), F.slice(given, 0, -1, axis=0)], 0)
    starts = F.concat([F.constant(np.ones(1, np.bool_)), F.less(F.slice(given, 1, END, axis=0), 0)], 0)
    late = F.logical_and(starts, F.logical_not(F.equal(given, 0)))
    return F.logical_or(F.logical_or(F.less(given, before), F.less(int64(count), given)), late)


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
    made = reduced(base, places, rows, 0, "amax" if reduce == "amax" else "sum")
    if reduce == "sum":
        return made
    if reduce == "amax":
        made = left_where(made, F.isnan(made))  # torch keeps it only where it comes first
    ones = expanded(F.constant(1, rows.dtype), sizes(bag), bag.shape)
    none = expanded(F.constant(0, rows.dtype), [count + 1], (count + 1 if isinstance(count, int) else None,))
    held = F.unsqueeze(F.scatter_elements(none, bag, ones, 0, reduction="add"), [1])
    if reduce == "mean":
        return F.div(made, F.maximum(held, F.constant(1, rows.dtype)))
    return F.where(F.equal(held, 0), F.constant(0, rows.dtype), made)
