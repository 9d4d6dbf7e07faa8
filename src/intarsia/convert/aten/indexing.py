"""Elements looked up by tensors of indices: index, index_put, gather, embedding, nonzero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import from_the_front
from intarsia.convert.aten.sizes import Size, int64, reshape, result_shape, size, sizes, wrap
from intarsia.convert.aten.view import broadcast, expanded, ordered
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F
from intarsia.network.value import broadcast as broadcast_shape

aten = torch.ops.aten

# Index lists as torch reads them: masks, None, negative numbers, broadcasting, the place of the result.

_MASKS = (ir.DataType.BOOL, ir.DataType.UINT8)


@dataclass(frozen=True)
class Indices:
    """Integer indices of one shape, for dimensions of `x`; the dimensions they make stand at `at`."""

    x: Tensor
    axes: list[int]
    indices: list[Tensor]
    at: int

    @property
    def rest(self) -> list[int]:
        """The dimensions that are taken whole."""
        return [axis for axis in range(self.x.ndim) if axis not in self.axes]

    @property
    def rank(self) -> int:
        """How many dimensions the indices make."""
        return self.indices[0].ndim


def read(x: Tensor, items: Sequence[Tensor | None]) -> Indices:
    """The elements of `x` that an index list selects."""
    axes: list[int] = []
    indices: list[Tensor] = []
    axis = 0
    for item in items:
        if item is None:
            axis += 1
        elif item.dtype not in _MASKS:
            axes.append(axis)
            indices.append(wrapped(item, size(x, axis)))
            axis += 1
        elif item.ndim == 0:  # a single truth makes a dimension of 0 or 1 elements
            x = F.unsqueeze(x, [axis])
            axes.append(axis)
            indices += places(F.reshape(item, [1]))
            axis += 1
        else:
            indices += places(item)
            axes += range(axis, axis + item.ndim)
            axis += item.ndim
    shape = broadcast_shape(*(index.shape for index in indices))
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    return Indices(x, axes, broadcast(indices, shape), axes[0] if adjacent else 0)


def wrapped(index: Tensor, extent: Size) -> Tensor:
    """An index tensor as int64, counted from the front: engines differ on negative ones."""
    known = index.constant
    if known is not None:
        if known.size == 0 or known.min() >= 0:
            return F.constant(known.astype(np.int64))
        if isinstance(extent, int):
            return F.constant(np.where(known < 0, known + extent, known).astype(np.int64))
    index = F.cast(index, ir.DataType.INT64)
    end = int64(extent)
    counted = F.where(F.less(index, 0), F.add(index, end), index)
    # What is negative still is out of range; an engine would count it from the end a second time.
    return F.where(F.less(counted, 0), end, counted)


def places(mask: Tensor) -> list[Tensor]:
    """Where a mask holds: one vector of indices a dimension."""
    known = mask.constant
    if known is not None:
        return [F.constant(line.astype(np.int64)) for line in np.nonzero(known)]
    places = kernels.nonzero(mask)
    if mask.ndim == 1:
        return [F.squeeze(places, [0])]
    return [F.squeeze(line, [0]) for line in F.split(places, [1] * mask.ndim, 0)]


def flat_index(asked: Indices) -> Tensor:
    """The indices as one: places in the indexed dimensions laid end to end."""
    total = asked.indices[0]
    for axis, index in zip(asked.axes[1:], asked.indices[1:], strict=True):
        total = F.add(F.mul(total, int64(size(asked.x, axis))), index)
    if len(asked.axes) == 1:
        return total
    # An index beyond its own dimension may well lie inside all of them laid end to end.
    extent: Size = 1
    for axis in asked.axes:
        extent = extent * size(asked.x, axis)
    for axis, index in zip(asked.axes, asked.indices, strict=True):
        if index.constant is None:
            total = F.where(F.less(index, int64(size(asked.x, axis))), total, int64(extent))
    return total


def flattened(asked: Indices) -> Tensor:
    """`x` with the indexed dimensions first, as one."""
    x = ordered(asked.x, [*asked.axes, *asked.rest])
    if len(asked.axes) == 1:
        return x
    extent: Size = 1
    for axis in asked.axes:
        extent = extent * size(asked.x, axis)
    return F.reshape(x, [extent, *(size(asked.x, axis) for axis in asked.rest)])


def restored(asked: Indices, flat: Tensor) -> Tensor:
    """The inverse of `flattened`."""
    order = [*asked.axes, *asked.rest]
    if len(asked.axes) > 1:
        flat = F.reshape(flat, [size(asked.x, axis) for axis in order])
    return ordered(flat, [order.index(axis) for axis in range(len(order))])


def to_result(asked: Indices, output: Tensor) -> Tensor:
    """The dimensions that the indices made, moved from the front to torch's position."""
    front = list(range(asked.rank))
    rest = list(range(asked.rank, output.ndim))
    return ordered(output, [*rest[: asked.at], *front, *rest[asked.at :]])


def to_front(asked: Indices, values: Tensor) -> Tensor:
    """The inverse of `to_result`."""
    front = range(asked.at, asked.at + asked.rank)
    return ordered(values, [*front, *(axis for axis in range(values.ndim) if axis not in front)])


def result_sizes(asked: Indices) -> tuple[list[Size], Shape]:
    """The sizes of the indexed part, in torch's order, and their known values."""
    rest = [(size(asked.x, axis), asked.x.shape[axis]) for axis in asked.rest]
    front = list(zip(sizes(asked.indices[0]), asked.indices[0].shape, strict=True))
    both = [*rest[: asked.at], *front, *rest[asked.at :]]
    return [wanted for wanted, _ in both], tuple(known for _, known in both)


# Tensors indexed by tensors, and written to that way: index, index_put.


@converter(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Context, self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    if all(item is None for item in indices):
        return self
    asked = read(self, indices)
    if len(asked.axes) == 1:
        return F.gather(asked.x, asked.indices[0], asked.axes[0])
    return to_result(asked, F.gather(flattened(asked), flat_index(asked), 0))


@converter(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: Context, self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    x = self
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
def put(ctx: Context, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    line, values = F.reshape(index, [-1]), F.reshape(source, [-1])
    flat = index_put(ctx, F.reshape(self, [-1]), [line], values, accumulate)
    return reshape(flat, sizes(self), self.shape)


# Elements and rows looked up by number: gather, index_select, take, embedding.


def cropped(x: Tensor, like: Tensor, but: int | None = None) -> Tensor:
    """The corner of `x` that has the sizes of `like`, along all dimensions or all but one."""
    for axis in range(x.ndim):
        have, want = x.shape[axis], like.shape[axis]
        if axis != but and (have != want or have is None):
            x = F.slice(x, 0, size(like, axis), axis=axis)
    return x


@converter(aten.gather.default)
def gather(ctx: Context, self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    axis = wrap(dim, self.ndim)
    index = from_the_front(index, size(self, axis) if self.ndim else 1)
    if self.ndim == 0 or index.ndim != self.ndim:  # one element, or no index at all
        flat = F.gather(F.reshape(self, [-1]), F.reshape(index, [-1]), 0)
        return reshape(flat, sizes(index), result_shape(ctx))
    return F.gather_elements(cropped(self, index, but=axis), index, axis)


@converter(aten.index_select.default)
def index_select(ctx: Context, self: Tensor, dim: int, index: Tensor) -> Tensor:
    axis = wrap(dim, self.ndim)
    index = F.reshape(index, [-1]) if index.ndim == 0 else index
    if self.ndim == 0:  # every index is 0
        return F.reshape(F.gather(F.reshape(self, [1]), from_the_front(index, 1), 0), [])
    return F.gather(self, from_the_front(index, size(self, axis)), axis)


@converter(aten.embedding.default)
def embedding(
    ctx: Context,
    weight: Tensor,
    indices: Tensor,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    # The last three concern gradients alone.
    return F.gather(weight, from_the_front(indices, size(weight, 0)), 0)


# Elements picked by a condition: nonzero, masked_select, masked_scatter.


@converter(aten.nonzero.default, aten.argwhere.default)
def nonzero(ctx: Context, self: Tensor) -> Tensor:
    if self.ndim == 0:  # a row for a truth, and no columns
        return F.slice(F.transpose(kernels.nonzero(F.reshape(self, [1])), (1, 0)), 0, 0, axis=1)
    return F.transpose(kernels.nonzero(self), (1, 0))


@converter(aten.nonzero_static.default)
def nonzero_static(ctx: Context, self: Tensor, *, size: Size, fill_value: int = -1) -> Tensor:
    places = nonzero(ctx, self)
    spare = F.full([size, self.ndim], fill_value, ir.DataType.INT64)
    return F.slice(F.concat([places, spare], 0), 0, size, axis=0)


@converter(aten.masked_select.default)
def masked_select(ctx: Context, self: Tensor, mask: Tensor) -> Tensor:
    x, holds = broadcast([self, mask], broadcast_shape(self.shape, mask.shape))
    places = F.squeeze(kernels.nonzero(F.reshape(holds, [-1])), [0])
    return F.gather(F.reshape(x, [-1]), places, 0)


@converter(aten.masked_scatter.default)
def masked_scatter(ctx: Context, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    shape = broadcast_shape(self.shape, mask.shape)
    x, holds = broadcast([self, mask], shape)
    # The n-th truth takes the n-th element; a spare one keeps the look-up valid where there is none.
    flat = F.concat([F.reshape(source, [-1]), F.full([1], 0, source.dtype)], 0)
    number = F.sub(F.cumsum(F.cast(F.reshape(holds, [-1]), ir.DataType.INT64), 0), 1)
    taken = F.gather(flat, F.maximum(number, F.constant(0, ir.DataType.INT64)), 0)
    return kernels.where(holds, reshape(taken, sizes(x), shape), x)
