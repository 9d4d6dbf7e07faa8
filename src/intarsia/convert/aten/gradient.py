"""Gradients that core ATen counts as operators: of convolution, pooling and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import windows
from intarsia.convert.aten.precision import is_empty, static, wide
from intarsia.convert.aten.windows import per_axis, spatial_sizes
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten
Table = np.ndarray[Any, Any]
Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _checked(*tensors: Tensor) -> None:
    if is_empty(*tensors):
        raise ConversionError("a gradient over no elements is not handled")


@converter(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    ctx: ConversionContext,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    _checked(grad_output, self)
    lead, sizes = [static(self, i) for i in range(self.ndim - 2)], spatial_sizes(self, 2)
    grad = wide(grad_output, halves=True)
    rows = [*lead, math.prod(spatial_sizes(grad_output, 2))]
    blank = F.full([*lead, math.prod(sizes)], 0, grad.dtype)
    places = F.reshape(F.cast(indices, ir.DataType.INT64), rows)
    made = F.scatter_elements(blank, places, F.reshape(grad, rows), axis=-1, reduction="add")
    return F.cast(F.reshape(made, [*lead, *sizes]), self.dtype)


def _spread(grad: Tensor, tables: Sequence[Table]) -> Tensor:
    """Each window's gradient to the elements it covers: `rows^T @ grad @ columns`."""
    rows, columns = (F.constant(table.astype(dtypes.to_numpy(grad.dtype))) for table in tables)
    return F.matmul(F.matmul(F.transpose(rows, (1, 0)), grad), columns)


@converter(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(ctx: ConversionContext, grad_output: Tensor, self: Tensor) -> Tensor:
    _checked(grad_output, self)
    tables = []
    for size, count in zip(spatial_sizes(self, 2), spatial_sizes(grad_output, 2), strict=True):
        table = np.zeros((count, size))
        for row, (places, real) in enumerate(zip(*windows.adaptive(size, count), strict=True)):
            table[row, places[real]] = 1 / real.sum()
        tables.append(table)
    return F.cast(_spread(wide(grad_output, halves=True), tables), self.dtype)


@converter(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    ctx: ConversionContext,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    _checked(grad_output, self)
    kernel = per_axis(kernel_size, 2, "kernel_size")
    strides = per_axis(stride, 2, "stride") if stride else kernel
    padded = per_axis(padding, 2, "padding")
    sizes, counts = spatial_sizes(self, 2), spatial_sizes(grad_output, 2)
    divisors: Any = divisor_override
    if divisors is None:
        divisors = windows.divisors(sizes, counts, kernel, strides, padded, count_include_pad)
    tables = []
    for size, count, k, s, p in zip(sizes, counts, kernel, strides, padded, strict=True):
        start = np.arange(count)[:, None] * s - p
        places = np.arange(size)[None]
        tables.append((places >= start) & (places < start + k))
    grad = wide(grad_output, halves=True)
    shared = F.div(grad, F.constant(np.asarray(divisors).astype(dtypes.to_numpy(grad.dtype))))
    return F.cast(_spread(shared, tables), self.dtype)


def _norm_gradient(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, axes: list[int]) -> Tensor:
    """Gradient of `(x - mean) * rstd`, whose statistics are over axes; `grad` holds the weight already."""
    normal = F.mul(F.sub(x, mean), rstd)
    along = F.reduce_mean(F.mul(grad, normal), axes)
    return F.mul(rstd, F.sub(F.sub(grad, F.reduce_mean(grad, axes)), F.mul(normal, along)))


@converter(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    ctx: ConversionContext,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Three:
    _checked(input)
    x, grad, mean, rstd = (wide(t, halves=True) for t in (input, grad_out, mean, rstd))
    inner = list(range(x.ndim - len(normalized_shape), x.ndim))
    outer = list(range(x.ndim - len(normalized_shape)))
    weighted = grad if weight is None else F.mul(grad, wide(weight, halves=True))
    made: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        made[0] = F.cast(_norm_gradient(x, weighted, mean, rstd, inner), input.dtype)
    if output_mask[1] and weight is not None:
        scaled = F.mul(grad, F.mul(F.sub(x, mean), rstd))
        made[1] = F.cast(_summed(scaled, outer), weight.dtype)
    if output_mask[2] and bias is not None:
        made[2] = F.cast(_summed(grad, outer), bias.dtype)
    return made[0], made[1], made[2]


def _summed(x: Tensor, axes: list[int]) -> Tensor:
    return F.reduce_sum(x, axes, keepdims=False) if axes else x


@converter(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    ctx: ConversionContext,
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    output_mask: Sequence[bool],
) -> Three:
    _checked(input)
    channels = static(input, 1)
    sizes = [static(input, 0), group, channels // group, math.prod(spatial_sizes(input, input.ndim - 2))]
    x, grad = (F.reshape(wide(t, halves=True), sizes) for t in (input, grad_out))
    mean, rstd = (F.reshape(wide(t, halves=True), [*sizes[:2], 1, 1]) for t in (mean, rstd))
    weighted = grad
    if weight is not None:
        weighted = F.mul(grad, F.reshape(wide(weight, halves=True), [1, group, channels // group, 1]))
    made: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        gradient = _norm_gradient(x, weighted, mean, rstd, [2, 3])
        made[0] = F.cast(F.reshape(gradient, [static(input, i) for i in range(input.ndim)]), input.dtype)
    if output_mask[1]:
        scaled = _summed(F.mul(grad, F.mul(F.sub(x, mean), rstd)), [0, 3])
        made[1] = F.cast(F.reshape(scaled, [channels]), ctx.value[1].dtype)
    if output_mask[2]:
        made[2] = F.cast(F.reshape(_summed(grad, [0, 3]), [channels]), ctx.value[2].dtype)
    return made[0], made[1], made[2]


@converter(aten.convolution_backward.default)
def convolution_backward(
    ctx: ConversionContext,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Three:
    _checked(grad_output, input, weight)
    rank = weight.ndim - 2
    strides, padded = per_axis(stride, rank, "stride"), per_axis(padding, rank, "padding")
    dilations = per_axis(dilation, rank, "dilation")
    grad, x, w = (wide(t, halves=True) for t in (grad_output, input, weight))
    made: list[Tensor | None] = [None, None, None]
    if output_mask[0] and transposed:
        made[0] = F.conv(grad, w, strides=strides, pads=padded * 2, dilations=dilations, groups=groups)
    elif output_mask[0]:
        kernel, sizes, counts = (spatial_sizes(t, rank) for t in (weight, input, grad_output))
        extra = [
            size - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, n, s, p, d, k in zip(sizes, counts, strides, padded, dilations, kernel, strict=True)
        ]
        made[0] = F.conv_transpose(
            grad,
            w,
            strides=strides,
            pads=padded * 2,
            dilations=dilations,
            output_padding=extra,
            groups=groups,
        )
    if output_mask[1]:
        data, filters = (grad, x) if transposed else (x, grad)
        made[1] = _weight_gradient(data, filters, spatial_sizes(w, rank), strides, padded, dilations, groups)
    if output_mask[2]:
        made[2] = F.reduce_sum(grad, [0, *range(2, grad.ndim)], keepdims=False)
    results = [None if t is None else F.cast(t, grad_output.dtype) for t in made]
    return results[0], results[1], results[2]


def _weight_gradient(
    data: Tensor,
    filters: Tensor,
    kernel: list[int],
    strides: list[int],
    padded: list[int],
    dilations: list[int],
    groups: int,
) -> Tensor:
    """A convolution in which batch and channels change places, and so do stride and dilation."""
    rank = len(kernel)
    order = [1, 0, *range(2, 2 + rank)]
    many, few = static(data, 1) // groups, static(filters, 1) // groups
    pieces = []
    for group in range(groups):
        images = F.slice(data, group * many, (group + 1) * many, axis=1)
        kernels = F.slice(filters, group * few, (group + 1) * few, axis=1)
        piece = F.conv(
            F.transpose(images, order),
            F.transpose(kernels, order),
            strides=dilations,
            pads=padded * 2,
            dilations=strides,
        )
        for i, size in enumerate(kernel):
            piece = F.slice(piece, 0, size, axis=2 + i)  # elements no window reached
        pieces.append(F.transpose(piece, order))
    return pieces[0] if groups == 1 else F.concat(pieces, 0)
