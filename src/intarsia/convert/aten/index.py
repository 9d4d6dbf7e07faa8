"""Tensors indexed by tensors, and written to that way: index, index_put."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.expand import expanded
from intarsia.convert.aten.indexing import (
    flat_index,
    flattened,
    read,
    restored,
    result_sizes,
    to_front,
    to_result,
)
from intarsia.convert.aten.sizes import Size, reshape, sizes
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: ConversionContext, self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if all(item is None for item in indices):
        return self
    asked = read(self, indices)
    if len(asked.axes) == 1:
        return F.gather(asked.x, asked.indices[0], asked.axes[0])
    return to_result(asked, F.gather(flattened(asked), flat_index(asked), 0))


@converter(aten.index_put.default)
def index_put(
    ctx: ConversionContext,
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    return _put(self, indices, values, accumulate)


@converter(aten._unsafe_index_put.default)
def unsafe_index_put(
    ctx: ConversionContext,
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    return _put(self, indices, values, accumulate)


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    if all(item is None for item in indices):
        whole = expanded(values, sizes(x), x.shape)
        return F.add(x, whole) if accumulate else whole
    if not accumulate and (chosen := _masked(x, indices, values)) is not None:
        return chosen
    asked = read(x, indices)
    wanted, known = result_sizes(asked)
    written = to_front(asked, expanded(values, wanted, known))
    base, places = flattened(asked), flat_index(asked)
    if not accumulate:
        return restored(asked, F.scatter_nd(base, F.unsqueeze(places, [-1]), written))
    # Added up element by element: a place that is named twice counts twice, in every engine.
    count = asked.rank
    rows = F.reshape(written, [-1, *sizes(base)[1:]]) if count != 1 else written
    line = F.reshape(places, [-1] + [1] * (base.ndim - 1))
    every: list[Size] = sizes(rows)
    wide = kernels.accumulator(x.dtype)
    total = F.scatter_elements(
        F.cast(base, wide), kernels.expand(line, every), F.cast(rows, wide), 0, reduction="add"
    )
    return restored(asked, F.cast(total, x.dtype))


def _masked(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor | None:
    """One mask and values that are the same wherever it holds: a choice, whose shape is known."""
    mask = indices[0]
    if mask is None or mask.dtype != ir.DataType.BOOL or any(item is not None for item in indices[1:]):
        return None
    rest = x.ndim - mask.ndim
    if values.ndim > rest:
        if values.ndim > rest + 1 or values.shape[0] != 1:
            return None
        values = F.squeeze(values, [0])
    holds = F.unsqueeze(mask, list(range(mask.ndim, x.ndim))) if rest else mask
    return kernels.where(holds, values, x)


@converter(aten.put.default)
def put(
    ctx: ConversionContext, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Tensor:
    line, values = F.reshape(index, [-1]), F.reshape(source, [-1])
    return reshape(_put(F.reshape(self, [-1]), [line], values, accumulate), sizes(self), self.shape)
