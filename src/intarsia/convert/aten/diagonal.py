"""Diagonals and triangles of matrices."""

from __future__ import annotations

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.sizes import Size, arange, int64, larger, reshape, size, sizes, smaller, wrap
from intarsia.convert.aten.transpose import moved
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.tril.default)
def tril(ctx: ConversionContext, self: Tensor, diagonal: Size = 0) -> Tensor:
    return kernels.trilu(self, diagonal, upper=False)


@converter(aten.triu.default)
def triu(ctx: ConversionContext, self: Tensor, diagonal: Size = 0) -> Tensor:
    return kernels.trilu(self, diagonal, upper=True)


def _length(rows: Size, columns: Size, offset: int) -> Size:
    """How long a diagonal of a matrix is."""
    if offset >= 0:
        return larger(smaller(rows, columns - offset), 0)
    return larger(smaller(rows + offset, columns), 0)


def taken(x: Tensor, offset: int, dim1: int, dim2: int) -> Tensor:
    """A diagonal of the matrices in two dimensions, as the last one."""
    x = moved(x, [wrap(dim1, x.ndim), wrap(dim2, x.ndim)], [x.ndim - 2, x.ndim - 1])
    *batch, rows, columns = sizes(x)
    start: Size = offset if offset >= 0 else columns * -offset
    places = arange(_length(rows, columns, offset), start, columns + 1)
    return F.gather(reshape(x, [*batch, rows * columns]), places, len(batch))


@converter(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(ctx: ConversionContext, self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return taken(self, offset, dim1, dim2)


@converter(aten.linalg_diagonal.default)
def linalg_diagonal(
    ctx: ConversionContext, A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Tensor:
    return taken(A, offset, dim1, dim2)


@converter(aten.diag.default)
def diag(ctx: ConversionContext, self: Tensor, diagonal: int = 0) -> Tensor:
    return taken(self, diagonal, 0, 1) if self.ndim == 2 else embedded(self, diagonal)


@converter(aten.diagflat.default)
def diagflat(ctx: ConversionContext, self: Tensor, offset: int = 0) -> Tensor:
    return embedded(F.reshape(self, [-1]), offset)


@converter(aten.diag_embed.default)
def diag_embed(
    ctx: ConversionContext, self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Tensor:
    made = embedded(self, offset)
    return moved(made, [made.ndim - 2, made.ndim - 1], [wrap(dim1, made.ndim), wrap(dim2, made.ndim)])


def embedded(x: Tensor, offset: int) -> Tensor:
    """Square matrices with `x`'s last dimension on a diagonal, zeros elsewhere."""
    extent = size(x, x.ndim - 1) + abs(offset)
    return _placed(x, None, extent, extent, offset)


@converter(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: ConversionContext, self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    rank = self.ndim
    axes, last = [wrap(dim1, rank), wrap(dim2, rank)], [rank - 2, rank - 1]
    x = moved(self, axes, last)
    made = _placed(F.cast(src, self.dtype), x, size(x, rank - 2), size(x, rank - 1), offset)
    return moved(made, last, axes)


def _placed(x: Tensor, base: Tensor | None, rows: Size, columns: Size, offset: int) -> Tensor:
    """Matrices whose diagonal is the last dimension of `x`, over `base` or zeros."""
    down, right = F.unsqueeze(arange(rows), [1]), F.unsqueeze(arange(columns), [0])
    on = F.equal(F.sub(right, down), int64(offset))
    # Above the main diagonal the element's number is its row, below it its column.
    extent = rows if offset >= 0 else columns
    missing = larger(extent - size(x, x.ndim - 1), 0)
    pads: list[Size] = [*[0] * (2 * x.ndim - 1), missing]
    line = kernels.pad(x, pads) if not isinstance(missing, int) or missing else x
    line = F.unsqueeze(line, [x.ndim] if offset >= 0 else [x.ndim - 1])
    zero = False if x.dtype == ir.DataType.BOOL else 0.0 if x.dtype in dtypes.FLOATS else 0
    return kernels.where(on, line, F.constant(zero, x.dtype) if base is None else base)
