"""One tensor cut into several: split, chunk, unbind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from intarsia.convert.aten.demands import left_where
from intarsia.convert.aten.sizes import END, Size, ceil_divide, floor_divide, modulo, size, smaller, wrap
from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
_LONGEST = 2**24  # places that every engine compares exactly


def cut(x: Tensor, lengths: Sequence[Size], axis: int) -> list[Tensor]:
    """`x` in pieces of these lengths along an axis."""
    if len(lengths) == 1:
        return [x]
    if all(isinstance(length, int) for length in lengths):
        return list(F.split(x, [int(length) for length in lengths], axis))  # type: ignore[arg-type]
    pieces, start = [], 0
    for length in lengths:
        end: Size = start + length
        pieces.append(F.slice(x, start, end, axis=axis))
        start = end  # type: ignore[assignment]
    return pieces


def _pieces(ctx: ConversionContext, x: Tensor, length: Size, axis: int) -> list[Tensor]:
    count, extent = len(ctx.value), size(x, axis)
    if isinstance(extent, int) and isinstance(length, int):
        return cut(x, [max(0, min(length, extent - i * length)) for i in range(count)], axis)
    # How many pieces there are torch has settled; a slice ends where the tensor does.
    bounds: list[Size] = [i * length if i else 0 for i in range(count)]
    return [F.slice(x, a, b, axis=axis) for a, b in zip(bounds, [*bounds[1:], END], strict=True)]


@converter(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor)
def split(ctx: ConversionContext, self: Tensor, split_size: Size, dim: int = 0) -> list[Tensor]:
    return _pieces(ctx, self, split_size, wrap(dim, self.ndim))


@converter(aten.chunk.default, aten.unsafe_chunk.default)
def chunk(ctx: ConversionContext, self: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    axis = wrap(dim, self.ndim)
    return _pieces(ctx, self, ceil_divide(size(self, axis), chunks), axis)


@converter(
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split_with_sizes.default,
)
def split_with_sizes(
    ctx: ConversionContext, self: Tensor, split_sizes: Sequence[Size], dim: int = 0
) -> list[Tensor]:
    return cut(self, split_sizes, wrap(dim, self.ndim))


@converter(aten.split.sizes)
def split_sizes(
    ctx: ConversionContext, self: Tensor, split_size: Sequence[Size], dim: int = 0
) -> list[Tensor]:
    return cut(self, split_size, wrap(dim, self.ndim))


@converter(aten.unbind.int, aten.unbind_copy.int)
def unbind(ctx: ConversionContext, self: Tensor, dim: int = 0) -> list[Tensor]:
    axis, count = wrap(dim, self.ndim), len(ctx.value)
    return [F.squeeze(piece, [axis]) for piece in cut(self, [1] * count, axis)]


@converter(aten.tensor_split.sections)
def tensor_split(ctx: ConversionContext, self: Tensor, sections: Size, dim: int = 0) -> list[Tensor]:
    if not isinstance(sections, int):
        raise ConversionError("a number of sections that is not known yet is not handled")
    return _even(self, sections, wrap(dim, self.ndim))


def _even(x: Tensor, sections: int, axis: int) -> list[Tensor]:
    extent = size(x, axis)
    share, rest = floor_divide(extent, sections), modulo(extent, sections)
    # The first `rest` pieces are one longer.
    bounds: list[Size] = [i * share + smaller(i, rest) if i else 0 for i in range(sections)]
    return _between(x, [*bounds, extent], axis)


def _between(x: Tensor, bounds: Sequence[Size], axis: int) -> list[Tensor]:
    if all(isinstance(bound, int) for bound in bounds):
        known = [int(bound) for bound in bounds]  # type: ignore[arg-type]
        return cut(x, [b - a for a, b in itertools.pairwise(known)], axis)
    return [F.slice(x, a, b, axis=axis) for a, b in itertools.pairwise(bounds)]


@converter(aten.tensor_split.indices)
def tensor_split_indices(
    ctx: ConversionContext, self: Tensor, indices: Sequence[Size], dim: int = 0
) -> list[Tensor]:
    return _at(self, indices, wrap(dim, self.ndim))


def _at(x: Tensor, indices: Sequence[Size], axis: int) -> list[Tensor]:
    # Bounds are those of slices: negative ones count from the end, a later one may be smaller.
    starts: list[Size] = [0, *indices]
    return [F.slice(x, a, b, axis=axis) for a, b in zip(starts, [*indices, END], strict=True)]


@converter(aten.tensor_split.tensor_indices_or_sections)
def tensor_split_tensor(
    ctx: ConversionContext, self: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0
) -> list[Tensor]:
    given, axis = tensor_indices_or_sections, wrap(dim, self.ndim)
    known = given.constant
    if given.ndim == 1:
        if known is not None:
            return _at(self, list(map(int, known)), axis)
        # Torch refuses the largest numbers, which a slice would cut to the size.
        far = F.logical_or(F.less(_LONGEST, given), F.less(given, -_LONGEST))
        inside = left_where(given, far)
        return _at(self, [F.gather(inside, i) for i in range(len(ctx.value) - 1)], axis)
    if known is None:
        raise ConversionError("a number of sections that is not known yet is not handled")
    return _even(self, int(known), axis)


def _stacked_axis(name: str, rank: int) -> int:
    return {"hsplit": 0 if rank == 1 else 1, "vsplit": 0, "dsplit": 2}[name]


@converter(aten.hsplit.int, aten.vsplit.int, aten.dsplit.int)
def hvd_split(ctx: ConversionContext, self: Tensor, sections: int) -> list[Tensor]:
    return _even(self, sections, _stacked_axis(_packet(ctx), self.ndim))


@converter(aten.hsplit.array, aten.vsplit.array, aten.dsplit.array)
def hvd_split_at(ctx: ConversionContext, self: Tensor, indices: Sequence[Size]) -> list[Tensor]:
    return _at(self, indices, _stacked_axis(_packet(ctx), self.ndim))


def _packet(ctx: ConversionContext) -> str:
    target = None if ctx.node is None else ctx.node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise ConversionError(f"{ctx.name} is not a call of an operator")
    return str(target.overloadpacket.__name__)
