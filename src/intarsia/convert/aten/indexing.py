"""Index lists as torch reads them: masks, None, negative numbers, broadcasting, where the result goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from intarsia.convert.aten import kernels
from intarsia.convert.aten.expand import broadcast
from intarsia.convert.aten.sizes import Size, int64, size, sizes
from intarsia.convert.aten.transpose import ordered
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F
from intarsia.network.infer.shapes import broadcast as broadcast_shape

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


def read(x: Tensor, given: Sequence[Tensor | None]) -> Indices:
    """What an index list asks of `x`."""
    axes: list[int] = []
    found: list[Tensor] = []
    axis = 0
    for item in given:
        if item is None:
            axis += 1
        elif item.dtype not in _MASKS:
            axes.append(axis)
            found.append(wrapped(item, size(x, axis)))
            axis += 1
        elif item.ndim == 0:  # a single truth makes a dimension of 0 or 1 elements
            x = F.unsqueeze(x, [axis])
            axes.append(axis)
            found += places(F.reshape(item, [1]))
            axis += 1
        else:
            found += places(item)
            axes += range(axis, axis + item.ndim)
            axis += item.ndim
    shape = broadcast_shape(*(index.shape for index in found))
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    return Indices(x, axes, broadcast(found, shape), axes[0] if adjacent else 0)


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
    found = kernels.nonzero(mask)
    if mask.ndim == 1:
        return [F.squeeze(found, [0])]
    return [F.squeeze(line, [0]) for line in F.split(found, [1] * mask.ndim, 0)]


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


def to_result(asked: Indices, made: Tensor) -> Tensor:
    """What the indices made, from the front to where torch puts it."""
    front = list(range(asked.rank))
    rest = list(range(asked.rank, made.ndim))
    return ordered(made, [*rest[: asked.at], *front, *rest[asked.at :]])


def to_front(asked: Indices, values: Tensor) -> Tensor:
    """The inverse of `to_result`."""
    front = range(asked.at, asked.at + asked.rank)
    return ordered(values, [*front, *(axis for axis in range(values.ndim) if axis not in front)])


def result_sizes(asked: Indices) -> tuple[list[Size], Shape]:
    """The sizes of what is indexed, as torch puts them, and what is known of them."""
    rest = [(size(asked.x, axis), asked.x.shape[axis]) for axis in asked.rest]
    front = list(zip(sizes(asked.indices[0]), asked.indices[0].shape, strict=True))
    both = [*rest[: asked.at], *front, *rest[asked.at :]]
    return [wanted for wanted, _ in both], tuple(known for _, known in both)
