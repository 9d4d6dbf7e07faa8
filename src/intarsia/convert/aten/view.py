"""The same elements in other sizes, orders or strides, and elements repeated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.sizes import (
    END,
    Size,
    arange,
    floor_divide,
    int64,
    modulo,
    reshape,
    result_shape,
    size,
    sizes,
    total,
    wrap,
)
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F
from intarsia.network.value import product

aten = torch.ops.aten


@converter(
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten._reshape_alias.default,
    aten.reshape.default,
    aten.view_as.default,
    aten.reshape_as.default,
)
def view(
    ctx: Context,
    self: Tensor,
    size: Sequence[Size] = (),
    shape: Sequence[Size] = (),
    other: Tensor | None = None,
    stride: Sequence[Size] = (),
) -> Tensor:
    return reshape(self, (size or shape) if other is None else sizes(other), result_shape(ctx))


@converter(aten.flatten.using_ints)
def flatten(ctx: Context, self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if self.ndim == 0:
        return F.reshape(self, [1])
    first, last = wrap(start_dim, self.ndim), wrap(end_dim, self.ndim)
    if first == last:
        return self
    sizes = [*(size(self, i) for i in range(first)), -1, *(size(self, i) for i in range(last + 1, self.ndim))]
    return reshape(self, sizes, result_shape(ctx))


@converter(aten.unflatten.int)
def unflatten(ctx: Context, self: Tensor, dim: int, sizes: Sequence[Size]) -> Tensor:
    at = wrap(dim, self.ndim)
    before = [size(self, i) for i in range(at)]
    after = [size(self, i) for i in range(at + 1, self.ndim)]
    return reshape(self, [*before, *sizes, *after], result_shape(ctx))


@converter(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(ctx: Context, self: Tensor, dim: int) -> Tensor:
    return F.unsqueeze(self, [wrap(dim, self.ndim + 1)])


@converter(
    aten.squeeze.default,
    aten.squeeze_copy.default,
    aten.squeeze.dim,
    aten.squeeze_copy.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.dims,
)
def squeeze(ctx: Context, self: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    # A size torch does not know to be 1 stays; torch's own rank of the result says whether that is so.
    dims = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({wrap(dim, self.ndim) for dim in dims} if self.ndim else set())
    gone = [axis for axis in axes if self.shape[axis] == 1]
    if self.ndim - len(gone) != len(result_shape(ctx)):
        raise ConversionError(f"squeezing shape {self.shape} depends on a size not known at compile time")
    return F.squeeze(self, gone) if gone else self


# Dimensions in another order.


def ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x` with its dimensions in this order; no layer if that is the order they have."""
    return x if list(order) == list(range(x.ndim)) else F.transpose(x, order)


def moved(x: Tensor, source: Sequence[int], destination: Sequence[int]) -> Tensor:
    """`x` with some dimensions moved, the others in their old order."""
    rest = iter([axis for axis in range(x.ndim) if axis not in source])
    place = dict(zip(destination, source, strict=True))
    return ordered(x, [place[axis] if axis in place else next(rest) for axis in range(x.ndim)])


def swapped(x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return ordered(x, order)


@converter(aten.permute.default, aten.permute_copy.default)
def permute(ctx: Context, self: Tensor, dims: Sequence[int]) -> Tensor:
    return ordered(self, [wrap(dim, self.ndim) for dim in dims])


@converter(aten.transpose.int, aten.transpose_copy.int, aten.swapdims.default, aten.swapaxes.default)
def transpose(
    ctx: Context, self: Tensor, dim0: int = 0, dim1: int = 0, axis0: int = 0, axis1: int = 0
) -> Tensor:
    """Some of these operators name their dimensions axes."""
    return swapped(self, wrap(dim0 or axis0, self.ndim), wrap(dim1 or axis1, self.ndim))


@converter(aten.t.default, aten.numpy_T.default, aten.matrix_H.default)
def t(ctx: Context, self: Tensor) -> Tensor:
    return ordered(self, list(reversed(range(self.ndim))))


@converter(aten.mT.default, aten.mH.default, aten.adjoint.default)
def matrix_transpose(ctx: Context, self: Tensor) -> Tensor:
    return swapped(self, self.ndim - 2, self.ndim - 1)


@converter(aten.movedim.intlist, aten.moveaxis.intlist, aten.movedim.int, aten.moveaxis.int)
def movedim(
    ctx: Context, self: Tensor, source: int | Sequence[int], destination: int | Sequence[int]
) -> Tensor:
    before, after = ([dims] if isinstance(dims, int) else dims for dims in (source, destination))
    return moved(self, [wrap(i, self.ndim) for i in before], [wrap(i, self.ndim) for i in after])


# Elements in another order: flip, roll, rot90, pixel and channel shuffles.


def flipped(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = F.slice(x, -1, -END, axis=axis, step=-1)
    return x


@converter(aten.flip.default)
def flip(ctx: Context, self: Tensor, dims: Sequence[int]) -> Tensor:
    return flipped(self, [wrap(dim, self.ndim) for dim in dims] if self.ndim else [])


@converter(aten.roll.default)
def roll(ctx: Context, self: Tensor, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        flat = _rolled(F.reshape(self, [-1]), shifts[0], 0)
        return reshape(flat, sizes(self), result_shape(ctx))
    x = self if self.ndim else F.reshape(self, [1])
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, wrap(dim, x.ndim))
    return x if self.ndim else F.reshape(x, [])


def _rolled(x: Tensor, shift: Size, axis: int) -> Tensor:
    extent = size(x, axis)
    turn = modulo(shift, extent)
    if isinstance(turn, int) and turn == 0:
        return x
    start = extent - turn
    return F.concat([F.slice(x, start, END, axis=axis), F.slice(x, 0, start, axis=axis)], axis)


@converter(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: Context, self: Tensor, upscale_factor: int) -> Tensor:
    r = upscale_factor
    if self.ndim == 4 and self.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16) and 0 not in self.shape:
        return F.op("DepthToSpace", self, blocksize=r, mode="CRD")
    *batch, channels, height, width = sizes(self)
    split = reshape(self, [*batch, floor_divide(channels, r * r), r, r, height, width])
    n = len(batch)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return reshape(
        F.transpose(split, order),
        [*batch, floor_divide(channels, r * r), height * r, width * r],
        result_shape(ctx),
    )


# Elements repeated: expand, broadcast, repeat, tile, repeat_interleave.


def expanded(x: Tensor, wanted: Sequence[Size], shape: Shape) -> Tensor:
    """`x` broadcast to these sizes; -1 keeps a size, and `shape` is what torch knows of the result."""
    padded = (1,) * (len(wanted) - x.ndim) + x.shape
    target: list[Size] = []
    for have, want, known in zip(padded, wanted, shape, strict=True):
        if (have == known and have is not None) or (isinstance(want, int) and want == -1):
            target.append(1)  # ONNX broadcasts both ways: a 1 leaves the size as it is
        else:
            target.append(known if isinstance(known, int) else want)
    if (
        len(wanted) == x.ndim
        and all(want == 1 for want in target if isinstance(want, int))
        and not any(isinstance(want, Tensor) for want in target)
    ):
        return x
    return kernels.expand(x, target)


@converter(aten.expand.default, aten.expand_copy.default, aten.broadcast_to.default, aten.expand_as.default)
def expand(
    ctx: Context,
    self: Tensor,
    size: Sequence[Size] = (),
    other: Tensor | None = None,
    *,
    implicit: bool = False,
) -> Tensor:
    return expanded(self, size if other is None else sizes(other), result_shape(ctx))


def broadcast(tensors: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """Every tensor in the sizes of all; `shape` is what is known of them."""
    wanted: list[Size] = []
    for place, known in enumerate(shape):
        wanted.append(known if isinstance(known, int) else _widest(tensors, place - len(shape), known))
    return [expanded(x, wanted, shape) for x in tensors]


def _widest(tensors: Sequence[Tensor], axis: int, known: str | None) -> Size:
    candidates = [x for x in tensors if x.ndim >= -axis and x.shape[axis] != 1]
    named = [x for x in candidates if x.shape[axis] == known and known is not None]
    if named or len(candidates) == 1:
        return size((named or candidates)[0], axis % (named or candidates)[0].ndim)
    common: Tensor | None = None
    for x in candidates:
        extent = F.size(x, axis)
        # The sizes are equal or 1, so the product of ONNX's broadcasting rule is their largest; an
        # empty size beats 1.
        common = extent if common is None else F.where(F.equal(common, 1), extent, common)
    assert common is not None
    return common


@converter(torch.ops.prims.broadcast_in_dim.default)
def broadcast_in_dim(
    ctx: Context, a: Tensor, shape: Sequence[Size], broadcast_dimensions: Sequence[int]
) -> Tensor:
    new = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return expanded(F.unsqueeze(a, new) if new else a, shape, result_shape(ctx))


@converter(aten.repeat.default, aten.tile.default)
def repeat(ctx: Context, self: Tensor, repeats: Sequence[Size] = (), dims: Sequence[Size] = ()) -> Tensor:
    repeats = [*[1] * (self.ndim - len(dims)), *dims] if ctx.operator == "tile" else repeats
    new = list(range(len(repeats) - self.ndim))
    x = F.unsqueeze(self, new) if new else self
    if all(isinstance(count, int) and count == 1 for count in repeats):
        return x
    return kernels.tile(x, repeats)


@converter(aten.repeat_interleave.Tensor)
def repeat_interleave_counts(ctx: Context, repeats: Tensor, *, output_size: Size | None = None) -> Tensor:
    return F.cast(_which(repeats), ctx.dtype)


def _which(repeats: Tensor) -> Tensor:
    """For every position of the result, the index of its element: [2, 0, 1] -> [0, 0, 2]."""
    counts = repeats.constant
    if counts is not None:
        return F.constant(np.repeat(np.arange(counts.size), counts.astype(np.int64)))
    ends = F.cumsum(F.cast(repeats, ir.DataType.INT64), 0)
    total = F.squeeze(F.slice(ends, -1, 2**62, axis=0), [0])
    passed = F.less_equal(F.unsqueeze(ends, [0]), F.unsqueeze(arange(total), [1]))
    return F.reduce_sum(F.cast(passed, ir.DataType.INT64), [1], keepdims=False)


# Memory seen through other strides: as_strided, its scatter, resize.


@converter(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    ctx: Context,
    self: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    flat, _ = _in_memory_order(ctx, self)
    return F.gather(flat, _strided_places(flat, size, stride, storage_offset), 0)


@converter(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: Context,
    self: Tensor,
    src: Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Tensor:
    flat, order = _in_memory_order(ctx, self)
    places = F.reshape(_strided_places(flat, size, stride, storage_offset), [-1])
    written = F.scatter_elements(flat, places, F.reshape(F.cast(src, self.dtype), [-1]), 0)
    back = reshape(written, [sizes(self)[axis] for axis in order])
    return ordered(back, [order.index(axis) for axis in range(self.ndim)])


def _strided_places(
    flat: Tensor, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None
) -> Tensor:
    """Which elements of memory a strided view shows."""
    places: Tensor = int64(0 if storage_offset is None else storage_offset)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        line = arange(extent, 0, step)
        later = list(range(1, len(size) - axis))
        places = total(F.unsqueeze(line, later) if later else line, places)
    known, held = places.constant, flat.shape[0]
    if known is not None and known.size and isinstance(held, int) and int(known.max()) >= held:
        raise ConversionError(f"a strided view reaches element {int(known.max())} of a tensor of {held}")
    return places


@converter(aten.resize.default)
def resize(ctx: Context, self: Tensor, size: Sequence[Size]) -> Tensor:
    flat, _ = _in_memory_order(ctx, self)
    have, want = flat.shape[0], product(result_shape(ctx))
    if not isinstance(have, int) or not isinstance(want, int) or want > have:
        raise ConversionError(f"resizing {have} to {want} elements leaves memory unset, which is not handled")
    return reshape(F.slice(flat, 0, want, axis=0), size, result_shape(ctx))


def _in_memory_order(ctx: Context, x: Tensor) -> tuple[Tensor, list[int]]:
    """The elements as torch holds them, and the order of `x`'s dimensions there.

    Refused where memory holds more than `x` shows.
    """
    source = None if ctx.node is None else ctx.node.args[0]
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise ConversionError("as_strided of a tensor whose strides are not known is not handled")
    if value.storage_offset() != 0:
        raise ConversionError(f"as_strided of a view at offset {value.storage_offset()} is not handled")
    order = sorted(range(value.ndim), key=lambda axis: value.stride(axis), reverse=True)
    if not value.permute(order).is_contiguous():
        raise ConversionError(f"as_strided of a tensor with strides {value.stride()} is not handled")
    return F.reshape(ordered(x, order), [-1]), order
