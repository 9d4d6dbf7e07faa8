"""Elements and rows looked up by number: gather, index_select, take, embedding."""

from __future__ import annotations

import torch

from intarsia.convert.aten.demands import from_the_front
from intarsia.convert.aten.expand import broadcast
from intarsia.convert.aten.indexing import wrapped
from intarsia.convert.aten.sizes import Size, reshape, result_shape, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F
from intarsia.network.infer.shapes import broadcast as broadcast_shape

aten = torch.ops.aten


def cropped(x: Tensor, like: Tensor, but: int | None = None) -> Tensor:
    """The corner of `x` that has the sizes of `like`, along all dimensions or all but one."""
    for axis in range(x.ndim):
        have, want = x.shape[axis], like.shape[axis]
        if axis != but and (have != want or have is None):
            x = F.slice(x, 0, size(like, axis), axis=axis)
    return x


@converter(aten.gather.default)
def gather(
    ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False
) -> Tensor:
    axis = wrap(dim, self.ndim)
    index = from_the_front(index, size(self, axis) if self.ndim else 1)
    if self.ndim == 0 or index.ndim != self.ndim:  # one element, or no index at all
        flat = F.gather(F.reshape(self, [-1]), F.reshape(index, [-1]), 0)
        return reshape(flat, sizes(index), result_shape(ctx))
    return F.gather_elements(cropped(self, index, but=axis), index, axis)


@converter(aten.index_select.default)
def index_select(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor) -> Tensor:
    axis = wrap(dim, self.ndim)
    index = F.reshape(index, [-1]) if index.ndim == 0 else index
    if self.ndim == 0:  # every index is 0
        return F.reshape(F.gather(F.reshape(self, [1]), from_the_front(index, 1), 0), [])
    return F.gather(self, from_the_front(index, size(self, axis)), axis)


@converter(aten.take.default)
def take(ctx: ConversionContext, self: Tensor, index: Tensor) -> Tensor:
    extent: Size = 1
    for one in sizes(self):
        extent = extent * one
    return F.gather(F.reshape(self, [-1]), wrapped(index, extent), 0)


@converter(aten.take_along_dim.default)
def take_along_dim(ctx: ConversionContext, self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        extent: Size = 1
        for one in sizes(self):
            extent = extent * one
        return F.gather(F.reshape(self, [-1]), from_the_front(F.reshape(indices, [-1]), extent), 0)
    axis = wrap(dim, self.ndim)
    index = from_the_front(indices, size(self, axis))
    # All dimensions but the one looked along broadcast.
    x = broadcast([self, _one(index, axis)], _but(axis, self, index))[0]
    places = broadcast([index, _one(self, axis)], _but(axis, index, self))[0]
    return F.gather_elements(x, places, axis)


def _but(axis: int, x: Tensor, other: Tensor) -> Shape:
    thin = [tuple(1 if i == axis else d for i, d in enumerate(t.shape)) for t in (x, other)]
    common = broadcast_shape(*thin)
    return (*common[:axis], x.shape[axis], *common[axis + 1 :])


def _one(x: Tensor, axis: int) -> Tensor:
    return F.slice(x, 0, 1, axis=axis)


@converter(aten.embedding.default)
def embedding(
    ctx: ConversionContext,
    weight: Tensor,
    indices: Tensor,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    # The last three concern gradients alone.
    return F.gather(weight, from_the_front(indices, size(weight, 0)), 0)
