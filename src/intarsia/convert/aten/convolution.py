"""Convolutions, plain and transposed, and windows laid side by side: unfold, im2col, col2im."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import filled, is_empty, is_float, per_axis, static, whole, wide
from intarsia.convert.aten.pooling import batched, flat_places, sliding, unbatched
from intarsia.convert.aten.pooling import unfold as windows_of
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
from intarsia.convert.aten.view import moved
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def _of_nothing(ctx: Context, bias: Tensor | None) -> Tensor:
    if bias is None or 0 in ctx.value.shape:
        return filled(ctx)
    rank = ctx.value.ndim - 2
    return F.expand(F.reshape(bias, [-1, *[1] * rank]), whole(list(ctx.value.shape), "a size"))


def _integer_conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int,
) -> Tensor:
    """An exact integer product over windows; engines convolve floats only."""
    rank, batch, channels, out = len(strides), static(x, 0), static(x, 1), static(w, 0)
    padded = F.pad(x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]) if any(pads) else x
    places = [sliding(static(padded, 2 + i), static(w, 2 + i), strides[i], dilations[i]) for i in range(rank)]
    counts = [len(windows) for windows in places]
    # (batch, channels, windows, place) as (batch, groups, channels/groups * place, windows)
    columns = F.reshape(
        windows_of(padded, places), [batch, groups, channels // groups, math.prod(counts), -1]
    )
    columns = F.reshape(F.transpose(columns, (0, 1, 2, 4, 3)), [batch, groups, -1, math.prod(counts)])
    product = F.matmul(F.reshape(w, [groups, out // groups, -1]), columns)
    result = F.reshape(product, [batch, out, *counts])
    return result if bias is None else F.add(result, F.reshape(bias, [-1, *[1] * rank]))


@converter(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    ctx: Context,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    if is_empty(input, weight):
        return _of_nothing(ctx, bias)
    rank = weight.ndim - 2
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    padded, extra = per_axis(padding, rank, "padding"), per_axis(output_padding, rank, "output_padding")
    x, w = wide(batched(input, rank)), wide(weight)
    shift = None if bias is None else wide(bias)
    if not is_float(input):
        result = _integer_conv_transpose(x, w, shift, strides, padded, extra, groups, dilations)
        return F.cast(unbatched(result, input, rank), ctx.dtype)
    ends, zeros = padded, [0] * rank
    # Kernels take an output padding below the stride only, though torch allows up to the dilation: it is
    # that much less cut off at the end, and where nothing is cut off, zeros.
    if any(e >= s for e, s in zip(extra, strides, strict=True)):
        ends = [max(p - e, 0) for p, e in zip(padded, extra, strict=True)]
        zeros = [max(e - p, 0) for p, e in zip(padded, extra, strict=True)]
        extra = [0] * rank
    result = F.conv_transpose(
        x,
        w,
        None if any(zeros) else shift,
        strides=strides,
        pads=[*padded, *ends],
        dilations=dilations,
        output_padding=extra,
        groups=groups,
    )
    if any(zeros):
        result = F.pad(result, [0] * (rank + 2) + [0, 0, *zeros])
        result = result if shift is None else F.add(result, F.reshape(shift, [-1, *[1] * rank]))
    return F.cast(unbatched(result, input, rank), ctx.dtype)


def _integer_conv_transpose(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    strides: list[int],
    padded: list[int],
    extra: list[int],
    groups: int,
    dilations: list[int],
) -> Tensor:
    """An exact integer product for each place of the kernel, added up where the places meet."""
    rank, batch, channels, out = len(strides), static(x, 0), static(x, 1), static(w, 1)
    kernel, sizes = ([static(t, 2 + i) for i in range(rank)] for t in (w, x))
    spans = [step * (size - 1) + 1 for step, size in zip(dilations, kernel, strict=True)]
    full = [(sizes[i] - 1) * strides[i] + spans[i] + extra[i] for i in range(rank)]
    ends = [full[i] - extra[i] for i in range(rank)]
    places = [sliding(ends[i], kernel[i], strides[i], dilations[i]) for i in range(rank)]
    # (channels, out/groups * place) turned, by (batch, groups, channels/groups, windows)
    turned = F.transpose(F.reshape(w, [groups, channels // groups, -1]), (0, 2, 1))
    columns = F.matmul(turned, F.reshape(x, [batch, groups, channels // groups, math.prod(sizes)]))
    columns = F.reshape(columns, [batch, groups * out, math.prod(kernel), math.prod(sizes)])
    flat = [batch, groups * out, math.prod(kernel) * math.prod(sizes)]
    updates = F.reshape(F.transpose(columns, (0, 1, 3, 2)), flat)
    index = F.expand(F.constant(flat_places(places, full).reshape(1, 1, -1)), flat)
    blank = F.full([*flat[:2], math.prod(full)], 0, x.dtype)
    result = F.reshape(F.scatter_elements(blank, index, updates, 2, reduction="add"), [*flat[:2], *full])
    for i, pad in enumerate(padded):
        if pad:
            result = F.slice(result, pad, full[i] - pad, axis=2 + i)
    return result if bias is None else F.add(result, F.reshape(bias, [-1, *[1] * rank]))


@converter(
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
def convolution(
    ctx: Context,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    transposed: bool = False,
    output_padding: Any = 0,
    groups: int = 1,
) -> Tensor:
    if transposed:
        return conv_transpose(ctx, input, weight, bias, stride, padding, output_padding, groups, dilation)
    if is_empty(input, weight):
        return _of_nothing(ctx, bias)
    rank = weight.ndim - 2
    strides, dilations = per_axis(stride, rank, "stride"), per_axis(dilation, rank, "dilation")
    if padding == "same":
        spans = [step * (static(weight, 2 + i) - 1) for i, step in enumerate(dilations)]
        # torch puts the odd element at the end
        pads = [span // 2 for span in spans] + [span - span // 2 for span in spans]
    else:
        pads = per_axis(0 if padding == "valid" else padding, rank, "padding") * 2
    x, w = wide(batched(input, rank)), wide(weight)
    shift = None if bias is None else wide(bias)
    if is_float(input):
        result = F.conv(x, w, shift, strides=strides, pads=pads, dilations=dilations, groups=groups)
    else:
        result = _integer_conv(x, w, shift, strides, pads, dilations, groups)
    return F.cast(unbatched(result, input, rank), ctx.dtype)


# Windows of a tensor laid side by side, and added up again: unfold, im2col, col2im.


@converter(aten.unfold.default, aten.unfold_copy.default)
def unfold(ctx: Context, self: Tensor, dimension: int, size: int, step: int) -> Tensor:
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
    ctx: Context,
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
    ctx: Context,
    self: Tensor,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    if not all(isinstance(extent, int) for extent in output_size):
        raise ConversionError("an output size that is not known at compile time is not handled")
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
