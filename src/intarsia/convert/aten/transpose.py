"""Dimensions in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten.sizes import wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x` with its dimensions in this order; no layer if that is the order they have."""
    return x if list(order) == list(range(x.ndim)) else F.transpose(x, order)


def moved(x: Tensor, source: Sequence[int], destination: Sequence[int]) -> Tensor:
    """`x` with some dimensions put elsewhere, the others in the order they had."""
    rest = iter([axis for axis in range(x.ndim) if axis not in source])
    place = dict(zip(destination, source, strict=True))
    return ordered(x, [place[axis] if axis in place else next(rest) for axis in range(x.ndim)])


def swapped(x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return ordered(x, order)


@converter(aten.permute.default, aten.permute_copy.default)
def permute(ctx: ConversionContext, self: Tensor, dims: Sequence[int]) -> Tensor:
    return ordered(self, [wrap(dim, self.ndim) for dim in dims])


@converter(aten.transpose.int, aten.transpose_copy.int, aten.swapdims.default)
def transpose(ctx: ConversionContext, self: Tensor, dim0: int, dim1: int) -> Tensor:
    return swapped(self, wrap(dim0, self.ndim), wrap(dim1, self.ndim))


@converter(aten.swapaxes.default)
def swapaxes(ctx: ConversionContext, self: Tensor, axis0: int, axis1: int) -> Tensor:
    return swapped(self, wrap(axis0, self.ndim), wrap(axis1, self.ndim))


@converter(aten.t.default, aten.numpy_T.default, aten.matrix_H.default)
def t(ctx: ConversionContext, self: Tensor) -> Tensor:
    return ordered(self, list(reversed(range(self.ndim))))


@converter(aten.mT.default, aten.mH.default, aten.adjoint.default)
def matrix_transpose(ctx: ConversionContext, self: Tensor) -> Tensor:
    return swapped(self, self.ndim - 2, self.ndim - 1)


@converter(aten.movedim.intlist, aten.moveaxis.intlist)
def movedim(
    ctx: ConversionContext, self: Tensor, source: Sequence[int], destination: Sequence[int]
) -> Tensor:
    rank = self.ndim
    return moved(self, [wrap(i, rank) for i in source], [wrap(i, rank) for i in destination])


@converter(aten.movedim.int, aten.moveaxis.int)
def movedim_int(ctx: ConversionContext, self: Tensor, source: int, destination: int) -> Tensor:
    return moved(self, [wrap(source, self.ndim)], [wrap(destination, self.ndim)])
