"""Parts of a tensor, and tensors with a part replaced: slice, select, narrow and their scatters."""

from __future__ import annotations

import torch

from intarsia.convert.aten.sizes import END, Size, arange, clamped, from_front, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    ctx: ConversionContext,
    self: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Tensor:
    axis = wrap(dim, self.ndim)
    first: Size = 0 if start is None else start
    last: Size = END if end is None else end
    if isinstance(first, int) and first == 0 and _reaches_end(last, self.shape[axis]) and step == 1:
        return self
    return F.slice(self, first, last, axis=axis, step=step)


def _reaches_end(end: Size, extent: int | str | None) -> bool:
    if not isinstance(end, int):
        return False
    return end >= END or (isinstance(extent, int) and end >= extent)


@converter(aten.select.int, aten.select_copy.int)
def select(ctx: ConversionContext, self: Tensor, dim: int, index: Size) -> Tensor:
    return F.gather(self, index, wrap(dim, self.ndim))


@converter(aten.narrow.default, aten.narrow_copy.default)
def narrow(ctx: ConversionContext, self: Tensor, dim: int, start: Size, length: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    first = from_front(start, size(self, axis))
    return F.slice(self, first, first + length, axis=axis)


@converter(aten.narrow.Tensor)
def narrow_tensor(ctx: ConversionContext, self: Tensor, dim: int, start: Tensor, length: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    extent = size(self, axis)
    first = from_front(F.cast(F.reshape(start, []), torch.int64), extent)
    # A slice would take what there is; torch raises, and so does a look-up beyond the end.
    return F.gather(self, F.add(F.where(F.less(first, 0), extent, first), arange(length)), axis)


@converter(aten.slice_scatter.default)
def slice_scatter(
    ctx: ConversionContext,
    self: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Tensor:
    axis = wrap(dim, self.ndim)
    extent = size(self, axis)
    first = clamped(0 if start is None else start, extent)
    return replaced(self, F.cast(src, self.dtype), axis, first, step)


@converter(aten.select_scatter.default)
def select_scatter(ctx: ConversionContext, self: Tensor, src: Tensor, dim: int, index: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    first = from_front(index, size(self, axis))
    return replaced(self, F.unsqueeze(F.cast(src, self.dtype), [axis]), axis, first, 1)


def replaced(x: Tensor, part: Tensor, axis: int, start: Size, step: int) -> Tensor:
    """`x` with `part` from `start` on, every `step` places along an axis."""
    count = size(part, axis)
    if step == 1:
        after = start + count
        if isinstance(start, int) and start == 0 and part.shape == x.shape and None not in x.shape:
            return part
        return F.concat([F.slice(x, 0, start, axis=axis), part, F.slice(x, after, END, axis=axis)], axis)
    places = arange(count, start, step)
    places = F.reshape(places, [-1 if i == axis else 1 for i in range(x.ndim)])
    return F.scatter_elements(x, F.expand(places, sizes(part)), part, axis)
