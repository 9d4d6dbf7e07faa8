"""Elements repeated: expand, broadcast, repeat, tile, repeat_interleave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.sizes import Size, arange, reshape, result_shape, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.interpreter import shape_of
from intarsia.convert.registry import converter
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


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


@converter(aten.expand.default, aten.expand_copy.default)
def expand(ctx: ConversionContext, self: Tensor, size: Sequence[Size], *, implicit: bool = False) -> Tensor:
    return expanded(self, size, result_shape(ctx))


@converter(aten.broadcast_to.default)
def broadcast_to(ctx: ConversionContext, self: Tensor, size: Sequence[Size]) -> Tensor:
    return expanded(self, size, result_shape(ctx))


@converter(aten.expand_as.default)
def expand_as(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    return expanded(self, sizes(other), result_shape(ctx))


@converter(aten.broadcast_tensors.default)
def broadcast_tensors(ctx: ConversionContext, tensors: Sequence[Tensor]) -> list[Tensor]:
    return broadcast(tensors, shape_of(ctx.value[0]))


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
    found: Tensor | None = None
    for x in candidates:
        extent = F.size(x, axis)
        # The sizes are equal or 1, so the product of ONNX's broadcasting rule is their largest; an
        # empty size beats 1.
        found = extent if found is None else F.where(F.equal(found, 1), extent, found)
    assert found is not None
    return found


@converter(torch.ops.prims.broadcast_in_dim.default)
def broadcast_in_dim(
    ctx: ConversionContext, a: Tensor, shape: Sequence[Size], broadcast_dimensions: Sequence[int]
) -> Tensor:
    new = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return expanded(F.unsqueeze(a, new) if new else a, shape, result_shape(ctx))


@converter(aten.repeat.default)
def repeat(ctx: ConversionContext, self: Tensor, repeats: Sequence[Size]) -> Tensor:
    return _tiled(self, repeats)


@converter(aten.tile.default)
def tile(ctx: ConversionContext, self: Tensor, dims: Sequence[Size]) -> Tensor:
    return _tiled(self, [1] * (self.ndim - len(dims)) + list(dims))


def _tiled(x: Tensor, repeats: Sequence[Size]) -> Tensor:
    new = list(range(len(repeats) - x.ndim))
    x = F.unsqueeze(x, new) if new else x
    if all(isinstance(count, int) and count == 1 for count in repeats):
        return x
    return kernels.tile(x, repeats)


@converter(aten.repeat_interleave.self_int)
def repeat_interleave_int(
    ctx: ConversionContext,
    self: Tensor,
    repeats: Size,
    dim: int | None = None,
    *,
    output_size: Size | None = None,
) -> Tensor:
    x, axis = _flat_or(self, dim)
    tall = F.unsqueeze(x, [axis + 1])
    target: list[Size] = [1] * tall.ndim
    target[axis + 1] = repeats
    extent = size(x, axis)
    joined = [*sizes(x)[:axis], extent * repeats, *sizes(x)[axis + 1 :]]
    return reshape(kernels.expand(tall, target), joined, result_shape(ctx))


@converter(aten.repeat_interleave.self_Tensor)
def repeat_interleave(
    ctx: ConversionContext,
    self: Tensor,
    repeats: Tensor,
    dim: int | None = None,
    *,
    output_size: Size | None = None,
) -> Tensor:
    x, axis = _flat_or(self, dim)
    if repeats.ndim == 0 or repeats.shape == (1,):
        repeats = kernels.expand(F.reshape(repeats, [1]), [size(x, axis)])
    return F.gather(x, _which(repeats), axis)


@converter(aten.repeat_interleave.Tensor)
def repeat_interleave_counts(
    ctx: ConversionContext, repeats: Tensor, *, output_size: Size | None = None
) -> Tensor:
    return F.cast(_which(repeats), ctx.dtype)


def _flat_or(x: Tensor, dim: int | None) -> tuple[Tensor, int]:
    if x.ndim == 0 or (dim is None and x.ndim > 1):
        return F.reshape(x, [-1]), 0
    return x, wrap(dim or 0, x.ndim)


def _which(repeats: Tensor) -> Tensor:
    """For every place of the result, which element stands there: [2, 0, 1] -> [0, 0, 2]."""
    counts = repeats.constant
    if counts is not None:
        return F.constant(np.repeat(np.arange(counts.size), counts.astype(np.int64)))
    ends = F.cumsum(F.cast(repeats, ir.DataType.INT64), 0)
    total = F.squeeze(F.slice(ends, -1, 2**62, axis=0), [0])
    passed = F.less_equal(F.unsqueeze(ends, [0]), F.unsqueeze(arange(total), [1]))
    return F.reduce_sum(F.cast(passed, ir.DataType.INT64), [1], keepdims=False)
