"""Other sizes over the same elements: view, reshape, flatten, squeeze, unsqueeze."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten.sizes import Size, reshape, result_shape, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.view.default, aten._unsafe_view.default, aten._reshape_copy.default, aten.view_copy.default)
def view(ctx: ConversionContext, self: Tensor, size: Sequence[Size]) -> Tensor:
    return reshape(self, size, result_shape(ctx))


@converter(aten.reshape.default)
def reshape_default(ctx: ConversionContext, self: Tensor, shape: Sequence[Size]) -> Tensor:
    return reshape(self, shape, result_shape(ctx))


@converter(aten.view_as.default, aten.reshape_as.default)
def view_as(ctx: ConversionContext, self: Tensor, other: Tensor) -> Tensor:
    return reshape(self, sizes(other), result_shape(ctx))


@converter(aten._reshape_alias.default)
def reshape_alias(
    ctx: ConversionContext, self: Tensor, size: Sequence[Size], stride: Sequence[Size]
) -> Tensor:
    return reshape(self, size, result_shape(ctx))


@converter(aten.flatten.using_ints)
def flatten(ctx: ConversionContext, self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if self.ndim == 0:
        return F.reshape(self, [1])
    first, last = wrap(start_dim, self.ndim), wrap(end_dim, self.ndim)
    if first == last:
        return self
    kept = [*(size(self, i) for i in range(first)), -1, *(size(self, i) for i in range(last + 1, self.ndim))]
    return reshape(self, kept, result_shape(ctx))


@converter(aten.ravel.default)
def ravel(ctx: ConversionContext, self: Tensor) -> Tensor:
    return self if self.ndim == 1 else F.reshape(self, [-1])


@converter(aten.unflatten.int)
def unflatten(ctx: ConversionContext, self: Tensor, dim: int, sizes: Sequence[Size]) -> Tensor:
    at = wrap(dim, self.ndim)
    before = [size(self, i) for i in range(at)]
    after = [size(self, i) for i in range(at + 1, self.ndim)]
    return reshape(self, [*before, *sizes, *after], result_shape(ctx))


@converter(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(ctx: ConversionContext, self: Tensor, dim: int) -> Tensor:
    return F.unsqueeze(self, [wrap(dim, self.ndim + 1)])


@converter(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(ctx: ConversionContext, self: Tensor) -> Tensor:
    return _squeezed(ctx, self, range(self.ndim))


@converter(aten.squeeze.dim, aten.squeeze_copy.dim)
def squeeze_dim(ctx: ConversionContext, self: Tensor, dim: int) -> Tensor:
    return _squeezed(ctx, self, [dim])


@converter(aten.squeeze.dims, aten.squeeze_copy.dims)
def squeeze_dims(ctx: ConversionContext, self: Tensor, dim: Sequence[int]) -> Tensor:
    return _squeezed(ctx, self, dim)


def _squeezed(ctx: ConversionContext, x: Tensor, dims: Sequence[int]) -> Tensor:
    # A size torch does not know to be 1 stays; torch's own rank of the result says whether that is so.
    axes = sorted({wrap(dim, x.ndim) for dim in dims} if x.ndim else set())
    gone = [axis for axis in axes if x.shape[axis] == 1]
    if x.ndim - len(gone) != len(result_shape(ctx)):
        raise ConversionError(f"squeezing a tensor of shape {x.shape} depends on a size not known yet")
    return F.squeeze(x, gone) if gone else x


@converter(aten.atleast_1d.default)
def atleast_1d(ctx: ConversionContext, self: Tensor) -> Tensor:
    return self if self.ndim >= 1 else F.unsqueeze(self, [0])


@converter(aten.atleast_2d.default)
def atleast_2d(ctx: ConversionContext, self: Tensor) -> Tensor:
    return self if self.ndim >= 2 else F.unsqueeze(self, list(range(2 - self.ndim)))


@converter(aten.atleast_3d.default)
def atleast_3d(ctx: ConversionContext, self: Tensor) -> Tensor:
    axes = {0: [0, 1, 2], 1: [0, 2], 2: [2]}.get(self.ndim, [])
    return F.unsqueeze(self, axes) if axes else self
