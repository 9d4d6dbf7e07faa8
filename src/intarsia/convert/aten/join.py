"""Several tensors made one: cat, stack, meshgrid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten.expand import broadcast
from intarsia.convert.aten.sizes import wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.interpreter import shape_of
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


def joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else F.concat(list(tensors), axis)


@converter(aten.cat.default)
def cat(ctx: ConversionContext, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat(ctx, tensors, dim)


@converter(aten.concat.default, aten.concatenate.default)
def concat(ctx: ConversionContext, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat(ctx, tensors, dim)


def _cat(ctx: ConversionContext, tensors: Sequence[Tensor], dim: int) -> Tensor:
    promoted = ctx.promote(*tensors)
    rank = max(x.ndim for x in promoted)
    # torch lets an empty vector join tensors of any rank, and ignores it.
    kept = [x for x in promoted if x.ndim == rank and (x.shape != (0,) or rank == 1)]
    return joined(kept, wrap(dim, rank))


@converter(aten.stack.default)
def stack(ctx: ConversionContext, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axis = wrap(dim, tensors[0].ndim + 1)
    return joined([F.unsqueeze(x, [axis]) for x in ctx.promote(*tensors)], axis)


@converter(aten.hstack.default)
def hstack(ctx: ConversionContext, tensors: Sequence[Tensor]) -> Tensor:
    raised = [x if x.ndim else F.unsqueeze(x, [0]) for x in ctx.promote(*tensors)]
    return joined(raised, 0 if raised[0].ndim == 1 else 1)


@converter(aten.vstack.default, aten.row_stack.default)
def vstack(ctx: ConversionContext, tensors: Sequence[Tensor]) -> Tensor:
    return joined([_raised(x, {0: [0, 1], 1: [0]}) for x in ctx.promote(*tensors)], 0)


@converter(aten.dstack.default)
def dstack(ctx: ConversionContext, tensors: Sequence[Tensor]) -> Tensor:
    return joined([_raised(x, {0: [0, 1, 2], 1: [0, 2], 2: [2]}) for x in ctx.promote(*tensors)], 2)


@converter(aten.column_stack.default)
def column_stack(ctx: ConversionContext, tensors: Sequence[Tensor]) -> Tensor:
    return joined([_raised(x, {0: [0, 1], 1: [1]}) for x in ctx.promote(*tensors)], 1)


def _raised(x: Tensor, new: dict[int, list[int]]) -> Tensor:
    return F.unsqueeze(x, new[x.ndim]) if x.ndim in new else x


@converter(aten.meshgrid.default)
def meshgrid(ctx: ConversionContext, tensors: Sequence[Tensor]) -> list[Tensor]:
    return _grids(ctx, tensors)


@converter(aten.meshgrid.indexing)
def meshgrid_indexing(ctx: ConversionContext, tensors: Sequence[Tensor], *, indexing: str) -> list[Tensor]:
    if indexing not in ("ij", "xy"):
        raise ConversionError(f"indexing={indexing!r} is not handled")
    if indexing == "ij" or len(tensors) < 2:
        return _grids(ctx, tensors)
    # "xy" is "ij" over the first two swapped, both before and after.
    turned = [tensors[1], tensors[0], *tensors[2:]]
    shape = shape_of(ctx.value[0])
    rank = len(turned)
    lines = [F.reshape(x, [-1 if i == place else 1 for i in range(rank)]) for place, x in enumerate(turned)]
    grids = broadcast(lines, shape)
    return [grids[1], grids[0], *grids[2:]]


def _grids(ctx: ConversionContext, tensors: Sequence[Tensor]) -> list[Tensor]:
    rank = len(tensors)
    lines = [F.reshape(x, [-1 if i == place else 1 for i in range(rank)]) for place, x in enumerate(tensors)]
    return broadcast(lines, shape_of(ctx.value[0]))
