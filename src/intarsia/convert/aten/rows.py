"""Slices of a tensor written or reduced at the numbers of a vector: index_add, index_copy, index_fill."""

from __future__ import annotations

import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.demands import from_the_front
from intarsia.convert.aten.expand import expanded
from intarsia.convert.aten.indexing import wrapped
from intarsia.convert.aten.scatter import reduced
from intarsia.convert.aten.sizes import Size, size, sizes, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
D = ir.DataType


@converter(aten.index_add.default)
def index_add(
    ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    wide = kernels.accumulator(self.dtype)
    scaled = source if alpha == 1 else F.mul(F.cast(source, wide), F.constant(alpha, wide))
    return _rows(F.cast(self, wide), dim, index, F.cast(scaled, wide), "sum", dtype=self.dtype)


@converter(aten.index_copy.default)
def index_copy(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _rows(self, dim, index, source, None)


@converter(aten.index_reduce.default)
def index_reduce(
    ctx: ConversionContext,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    if self.dtype in (D.FLOAT16, D.BFLOAT16) and reduce in ("mean", "prod"):
        raise ConversionError(
            f"reduce={reduce!r} in {self.dtype.name}, which torch rounds at each step, is not handled"
        )
    return _rows(self, dim, index, source, reduce, include_self)


@converter(aten.index_fill.int_Scalar)
def index_fill(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return _filled(self, dim, index, F.constant(value, self.dtype))


@converter(aten.index_fill.int_Tensor)
def index_fill_tensor(ctx: ConversionContext, self: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    return _filled(self, dim, index, F.cast(value, self.dtype))


def _filled(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    line = F.reshape(index, [-1])
    if x.ndim == 0:
        return F.reshape(_filled(F.reshape(x, [1]), 0, line, value), [])
    axis = wrap(dim, x.ndim)
    wanted: list[Size] = [size(line, 0) if i == axis else size(x, i) for i in range(x.ndim)]
    known = tuple(line.shape[0] if i == axis else d for i, d in enumerate(x.shape))
    return _rows(x, dim, line, expanded(value, wanted, known), None, counts_back=True)


def _rows(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str | None,
    include_self: bool = True,
    dtype: ir.DataType | None = None,
    counts_back: bool = False,
) -> Tensor:
    """`x` with slices of `source` written or reduced at the numbers of a vector.

    Negative numbers count from the end where torch reads them so (`counts_back`), elsewhere it refuses them.
    """
    wanted = x.dtype if dtype is None else dtype
    if x.ndim == 0:
        flat = _rows(
            F.reshape(x, [1]),
            0,
            F.reshape(index, [-1]),
            F.reshape(source, [-1]),
            reduce,
            include_self,
            counts_back=counts_back,
        )
        return F.cast(F.reshape(flat, []), wanted)
    axis = wrap(dim, x.ndim)
    if 0 in source.shape:
        return F.cast(x, wanted)
    source = F.unsqueeze(source, list(range(x.ndim))) if source.ndim == 0 else source
    read = wrapped if counts_back else from_the_front
    line = F.reshape(read(index, size(x, axis)), [-1 if i == axis else 1 for i in range(x.ndim)])
    places = expanded(line, sizes(source), source.shape)
    return F.cast(reduced(x, places, source, axis, reduce, include_self), wanted)
