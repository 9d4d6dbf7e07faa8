"""Windows of a tensor laid side by side, and added up again: unfold, im2col, col2im."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.sizes import (
    Size,
    arange,
    floor_divide,
    reshape,
    result_shape,
    size,
    sizes,
    total,
    wrap,
)
from intarsia.convert.aten.transpose import moved
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.unfold.default, aten.unfold_copy.default)
def unfold(ctx: ConversionContext, self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    if self.ndim == 0:
        return F.slice(F.reshape(self, [1]), 0, size, axis=0)
    axis = wrap(dimension, self.ndim)
    count = _windows(self, axis, size, step)
    starts, within = F.unsqueeze(arange(count, 0, step), [1]), F.unsqueeze(arange(size), [0])
    windows = F.gather(self, total(starts, within), axis)
    return moved(windows, [axis + 1], [windows.ndim - 1])


def _windows(x: Tensor, axis: int, span: int, step: int) -> Size:
    return floor_divide(size(x, axis) - span, step) + 1


@converter(aten.im2col.default)
def im2col(
    ctx: ConversionContext,
    self: Tensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    x = self if self.ndim == 4 else F.unsqueeze(self, [0])
    tall, wide = padding
    if tall or wide:
        x = kernels.pad(x, [0, 0, tall, wide, 0, 0, tall, wide])
    batch, channels, _, _ = sizes(x)
    rows, columns = (_places(x, 2 + i, kernel_size[i], dilation[i], stride[i]) for i in range(2))
    # (n, c, h, w) -> (n, c, kernel rows, rows, kernel columns, columns)
    windows = F.gather(F.gather(x, rows, 2), columns, 4)
    windows = F.transpose(windows, (0, 1, 2, 4, 3, 5))
    area = kernel_size[0] * kernel_size[1]
    joined: list[Size] = [channels * area, size(rows, 1) * size(columns, 1)]
    return reshape(windows, joined if self.ndim == 3 else [batch, *joined], result_shape(ctx))


def _places(x: Tensor, axis: int, kernel: int, dilation: int, stride: int) -> Tensor:
    """For every element of the kernel, the places it meets."""
    count = _windows(x, axis, dilation * (kernel - 1) + 1, stride)
    within, starts = F.unsqueeze(arange(kernel, 0, dilation), [1]), F.unsqueeze(arange(count, 0, stride), [0])
    return total(within, starts)


@converter(aten.col2im.default)
def col2im(
    ctx: ConversionContext,
    self: Tensor,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    if not all(isinstance(extent, int) for extent in output_size):
        raise ConversionError("an output size that is not known yet is not handled")
    x = self if self.ndim == 3 else F.unsqueeze(self, [0])
    full = [int(extent) + 2 * pad for extent, pad in zip(output_size, padding, strict=True)]  # type: ignore[arg-type]
    rows, columns = (_covered(full[i], kernel_size[i], dilation[i], stride[i]) for i in range(2))
    places = rows[:, None, :, None] * full[1] + columns[None, :, None, :]
    batch, blocks, _ = sizes(x)
    channels = floor_divide(blocks, kernel_size[0] * kernel_size[1])
    wide = kernels.accumulator(x.dtype)
    updates = F.cast(F.reshape(x, [batch, channels, int(places.size)]), wide)
    index = kernels.expand(F.constant(places.reshape(1, 1, -1).astype(np.int64)), [batch, channels, 1])
    base = F.full([batch, channels, full[0] * full[1]], 0, wide)
    added = F.scatter_elements(base, index, updates, 2, reduction="add")
    image = F.reshape(F.cast(added, x.dtype), [batch, channels, *full])
    for axis, pad in enumerate(padding, start=2):
        if pad:
            image = F.slice(image, pad, -pad, axis=axis)
    return image if self.ndim == 3 else F.squeeze(image, [0])


def _covered(
    extent: int, kernel: int, dilation: int, stride: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    count = (extent - dilation * (kernel - 1) - 1) // stride + 1
    return np.arange(kernel)[:, None] * dilation + np.arange(count)[None, :] * stride
