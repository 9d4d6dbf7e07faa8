"""Elements in another order along dimensions: flip, roll, rot90, pixel and channel shuffles."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from intarsia.convert.aten.sizes import (
    END,
    Size,
    floor_divide,
    modulo,
    reshape,
    result_shape,
    size,
    sizes,
    wrap,
)
from intarsia.convert.aten.transpose import swapped
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def flipped(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = F.slice(x, -1, -END, axis=axis, step=-1)
    return x


@converter(aten.flip.default)
def flip(ctx: ConversionContext, self: Tensor, dims: Sequence[int]) -> Tensor:
    return flipped(self, [wrap(dim, self.ndim) for dim in dims] if self.ndim else [])


@converter(aten.fliplr.default)
def fliplr(ctx: ConversionContext, self: Tensor) -> Tensor:
    return flipped(self, [1])


@converter(aten.flipud.default)
def flipud(ctx: ConversionContext, self: Tensor) -> Tensor:
    return flipped(self, [0])


@converter(aten.rot90.default)
def rot90(ctx: ConversionContext, self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = (wrap(dim, self.ndim) for dim in dims)
    turned = {0: lambda: self, 1: lambda: swapped(flipped(self, [b]), a, b)}
    turned |= {2: lambda: flipped(self, [a, b]), 3: lambda: swapped(flipped(self, [a]), a, b)}
    return turned[k % 4]()


@converter(aten.roll.default)
def roll(ctx: ConversionContext, self: Tensor, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Tensor:
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
def pixel_shuffle(ctx: ConversionContext, self: Tensor, upscale_factor: int) -> Tensor:
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


@converter(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: ConversionContext, self: Tensor, downscale_factor: int) -> Tensor:
    r = downscale_factor
    *batch, channels, height, width = sizes(self)
    low, thin = floor_divide(height, r), floor_divide(width, r)
    split = reshape(self, [*batch, channels, low, r, thin, r])
    n = len(batch)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return reshape(F.transpose(split, order), [*batch, channels * (r * r), low, thin], result_shape(ctx))


@converter(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(ctx: ConversionContext, self: Tensor, groups: Size) -> Tensor:
    assert isinstance(groups, int)
    batch, channels, *rest = sizes(self)
    split = reshape(self, [batch, groups, floor_divide(channels, groups), *rest])
    return reshape(swapped(split, 1, 2), [batch, channels, *rest], result_shape(ctx))
