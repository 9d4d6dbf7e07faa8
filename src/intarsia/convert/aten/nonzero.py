"""Elements picked by a condition: nonzero, masked_select, masked_scatter."""

from __future__ import annotations

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.expand import broadcast
from intarsia.convert.aten.sizes import Size, reshape, sizes
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.network.infer.shapes import broadcast as broadcast_shape

aten = torch.ops.aten


@converter(aten.nonzero.default, aten.argwhere.default)
def nonzero(ctx: ConversionContext, self: Tensor) -> Tensor:
    if self.ndim == 0:  # a row for a truth, and no columns
        return F.slice(F.transpose(kernels.nonzero(F.reshape(self, [1])), (1, 0)), 0, 0, axis=1)
    return F.transpose(kernels.nonzero(self), (1, 0))


@converter(aten.nonzero_static.default)
def nonzero_static(ctx: ConversionContext, self: Tensor, *, size: Size, fill_value: int = -1) -> Tensor:
    found = nonzero(ctx, self)
    spare = F.full([size, self.ndim], fill_value, ir.DataType.INT64)
    return F.slice(F.concat([found, spare], 0), 0, size, axis=0)


@converter(aten.nonzero_numpy.default)
def nonzero_numpy(ctx: ConversionContext, self: Tensor) -> list[Tensor]:
    x = self if self.ndim else F.reshape(self, [1])
    return [F.squeeze(line, [0]) for line in F.split(kernels.nonzero(x), [1] * x.ndim, 0)]


@converter(aten.masked_select.default)
def masked_select(ctx: ConversionContext, self: Tensor, mask: Tensor) -> Tensor:
    x, holds = broadcast([self, mask], broadcast_shape(self.shape, mask.shape))
    found = F.squeeze(kernels.nonzero(F.reshape(holds, [-1])), [0])
    return F.gather(F.reshape(x, [-1]), found, 0)


@converter(aten.masked_scatter.default)
def masked_scatter(ctx: ConversionContext, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    shape = broadcast_shape(self.shape, mask.shape)
    x, holds = broadcast([self, mask], shape)
    # The n-th truth takes the n-th element; a spare one keeps the look-up valid where there is none.
    flat = F.concat([F.reshape(source, [-1]), F.full([1], 0, source.dtype)], 0)
    number = F.sub(F.cumsum(F.cast(F.reshape(holds, [-1]), ir.DataType.INT64), 0), 1)
    taken = F.gather(flat, F.maximum(number, F.constant(0, ir.DataType.INT64)), 0)
    return kernels.where(holds, reshape(taken, sizes(x), shape), x)
