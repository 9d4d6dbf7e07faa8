"""Parts of a tensor: slices, splits, diagonals; and tensors joined or padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.convert.aten import kernels
from intarsia.convert.aten.kernels import left_where, whole
from intarsia.convert.aten.sizes import (
    END,
    Size,
    arange,
    ceil_divide,
    clamped,
    from_front,
    int64,
    larger,
    reshape,
    size,
    sizes,
    smaller,
    wrap,
)
from intarsia.convert.aten.view import moved
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    ctx: Context,
    self: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Tensor:
    axis = wrap(dim, self.ndim)
    first: Size = 0 if start is None else start
    last: Size = END if end is None else end
    if isinstance(first, int) and first == 0 and _reaches_end(last, self.shape[axis]) and step == 1:
        return self
    return F.slice(self, first, last, axis=axis, step=step)


def _reaches_end(end: Size, extent: int | str | None) -> bool:
    if not isinstance(end, int):
        return False
    return end >= END or (isinstance(extent, int) and end >= extent)


@converter(aten.select.int, aten.select_copy.int)
def select(ctx: Context, self: Tensor, dim: int, index: Size) -> Tensor:
    return F.gather(self, index, wrap(dim, self.ndim))


@converter(aten.narrow.default, aten.narrow_copy.default)
def narrow(ctx: Context, self: Tensor, dim: int, start: Size, length: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    first = from_front(start, size(self, axis))
    return F.slice(self, first, first + length, axis=axis)


@converter(aten.narrow.Tensor)
def narrow_tensor(ctx: Context, self: Tensor, dim: int, start: Tensor, length: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    extent = size(self, axis)
    first = from_front(F.cast(F.reshape(start, []), torch.int64), extent)
    # A slice would take what there is; torch raises, and so does a look-up beyond the end.
    return F.gather(self, F.add(F.where(F.less(first, 0), extent, first), arange(length)), axis)


@converter(aten.slice_scatter.default)
def slice_scatter(
    ctx: Context,
    self: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Tensor:
    axis = wrap(dim, self.ndim)
    extent = size(self, axis)
    first = clamped(0 if start is None else start, extent)
    return replaced(self, F.cast(src, self.dtype), axis, first, step)


@converter(aten.select_scatter.default)
def select_scatter(ctx: Context, self: Tensor, src: Tensor, dim: int, index: Size) -> Tensor:
    axis = wrap(dim, self.ndim)
    first = from_front(index, size(self, axis))
    return replaced(self, F.unsqueeze(F.cast(src, self.dtype), [axis]), axis, first, 1)


def replaced(x: Tensor, part: Tensor, axis: int, start: Size, step: int) -> Tensor:
    """`x` with `part` from `start` on, every `step` places along an axis."""
    count = size(part, axis)
    if step == 1:
        after = start + count
        if isinstance(start, int) and start == 0 and part.shape == x.shape and None not in x.shape:
            return part
        return F.concat([F.slice(x, 0, start, axis=axis), part, F.slice(x, after, END, axis=axis)], axis)
    places = arange(count, start, step)
    places = F.reshape(places, [-1 if i == axis else 1 for i in range(x.ndim)])
    return F.scatter_elements(x, F.expand(places, sizes(part)), part, axis)


# One tensor cut into several: split, chunk, unbind.

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


def _pieces(ctx: Context, x: Tensor, length: Size, axis: int) -> list[Tensor]:
    count, extent = len(ctx.value), size(x, axis)
    if isinstance(extent, int) and isinstance(length, int):
        return cut(x, [max(0, min(length, extent - i * length)) for i in range(count)], axis)
    # How many pieces there are torch has settled; a slice ends where the tensor does.
    bounds: list[Size] = [i * length if i else 0 for i in range(count)]
    return [F.slice(x, a, b, axis=axis) for a, b in zip(bounds, [*bounds[1:], END], strict=True)]


@converter(
    *(aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor, aten.split.sizes),
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split_with_sizes.default,
)
def split(
    ctx: Context,
    self: Tensor,
    split_size: Size | Sequence[Size] = (),
    split_sizes: Sequence[Size] = (),
    dim: int = 0,
) -> list[Tensor]:
    axis = wrap(dim, self.ndim)
    if isinstance(split_size, int | Tensor):
        return _pieces(ctx, self, split_size, axis)
    return cut(self, split_sizes or split_size, axis)


@converter(aten.chunk.default, aten.unsafe_chunk.default)
def chunk(ctx: Context, self: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    axis = wrap(dim, self.ndim)
    return _pieces(ctx, self, ceil_divide(size(self, axis), chunks), axis)


@converter(aten.unbind.int, aten.unbind_copy.int)
def unbind(ctx: Context, self: Tensor, dim: int = 0) -> list[Tensor]:
    axis, count = wrap(dim, self.ndim), len(ctx.value)
    return [F.squeeze(piece, [axis]) for piece in cut(self, [1] * count, axis)]


@converter(aten.tensor_split.tensor_indices_or_sections)
def tensor_split_tensor(
    ctx: Context, self: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0
) -> list[Tensor]:
    sections, axis = tensor_indices_or_sections, wrap(dim, self.ndim)
    if sections.ndim == 0:
        return cut(self, whole([piece.shape[axis] for piece in ctx.value], "the sizes of the pieces"), axis)
    known = sections.constant
    if known is not None:
        bounds: list[Size] = list(map(int, known))
    else:
        # Torch refuses the largest numbers, which a slice would cut to the size.
        far = F.logical_or(F.less(_LONGEST, sections), F.less(sections, -_LONGEST))
        inside = left_where(sections, far)
        bounds = [F.gather(inside, i) for i in range(len(ctx.value) - 1)]
    # Bounds are those of slices: negative ones count from the end, a later one may be smaller.
    return [F.slice(self, a, b, axis=axis) for a, b in zip([0, *bounds], [*bounds, END], strict=True)]


# Several tensors made one: cat, stack.


def joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else F.concat(list(tensors), axis)


@converter(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(ctx: Context, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    promoted = ctx.promote(*tensors)
    rank = max(x.ndim for x in promoted)
    # torch lets an empty vector join tensors of any rank, and ignores it.
    parts = [x for x in promoted if x.ndim == rank and (x.shape != (0,) or rank == 1)]
    return joined(parts, wrap(dim, rank))


@converter(aten.stack.default)
def stack(ctx: Context, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axis = wrap(dim, tensors[0].ndim + 1)
    return joined([F.unsqueeze(x, [axis]) for x in ctx.promote(*tensors)], axis)


# Borders put around a tensor, or cut off where the padding is negative.

Sides = list[tuple[Size, Size]]
_MODES = ("constant", "reflect", "replicate", "circular")  # in the order of torch's numbers
_LAYER_MODE = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@converter(aten.constant_pad_nd.default, aten.pad.default, aten._pad_enum.default, aten._pad_circular.default)
def pad(
    ctx: Context, self: Tensor, pad: Sequence[Size], mode: str | int = "constant", value: float | None = None
) -> Tensor:
    name = _MODES[mode] if isinstance(mode, int) else mode
    name = "circular" if ctx.operator == "_pad_circular" else name
    return padded(self, pad, name, 0 if value is None else value)


@converter(
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
)
def border_pad(ctx: Context, self: Tensor, padding: Sequence[Size]) -> Tensor:
    return padded(self, padding, "reflect" if ctx.operator.startswith("reflection") else "replicate")


def padded(x: Tensor, pad: Sequence[Size], mode: str, value: float = 0) -> Tensor:
    """`x` with borders; torch lists them from the last dimension on: before, after, before, after, ..."""
    sides: Sides = [(0, 0)] * (x.ndim - len(pad) // 2)
    sides += reversed(list(zip(pad[::2], pad[1::2], strict=True)))
    if mode == "circular":
        return _circular(x, sides)
    if mode not in _LAYER_MODE:
        raise ConversionError(f"mode={mode!r} is not handled")
    if mode != "constant" and not all(isinstance(amount, int) for amount in pad):
        raise ConversionError(f"mode={mode!r} by an amount unknown at compile time is not handled")
    # What is cut off is cut off at the end: it may still be mirrored to the other side.
    grown = [(_grow(before), _grow(after)) for before, after in sides]
    if any(not isinstance(amount, int) or amount for side in grown for amount in side):
        amounts = [before for before, _ in grown] + [after for _, after in grown]
        x = kernels.pad(
            x, amounts, F.constant(value, x.dtype) if mode == "constant" else None, _LAYER_MODE[mode]
        )
    return _cut(x, sides)


def _grow(amount: Size) -> Size:
    return max(amount, 0) if isinstance(amount, int) else amount


def _cut(x: Tensor, sides: Sequence[tuple[Size, Size]]) -> Tensor:
    for axis, (before, after) in enumerate(sides):
        start = -before if isinstance(before, int) and before < 0 else 0
        end = after if isinstance(after, int) and after < 0 else END
        if start or end != END:
            x = F.slice(x, start, end, axis=axis)
    return x


def _circular(x: Tensor, sides: Sides) -> Tensor:
    for axis, (before, after) in enumerate(sides):
        if not isinstance(before, int) or not isinstance(after, int):
            raise ConversionError("mode='circular' by an amount unknown at compile time is not handled")
        x = _cut(x, [(0, 0)] * axis + [(min(before, 0), min(after, 0))])
        parts = [x]
        if before > 0:
            parts.insert(0, F.slice(x, size(x, axis) - before, END, axis=axis))
        if after > 0:
            parts.append(F.slice(x, 0, after, axis=axis))
        x = F.concat(parts, axis) if len(parts) > 1 else x
    return x


# Diagonals and triangles of matrices.


@converter(aten.tril.default, aten.triu.default)
def triangle(ctx: Context, self: Tensor, diagonal: Size = 0) -> Tensor:
    return kernels.trilu(self, diagonal, upper=ctx.operator == "triu")


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
def diagonal(ctx: Context, self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return taken(self, offset, dim1, dim2)


@converter(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: Context, self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    rank = self.ndim
    axes, last = [wrap(dim1, rank), wrap(dim2, rank)], [rank - 2, rank - 1]
    x = moved(self, axes, last)
    result = _placed(F.cast(src, self.dtype), x, size(x, rank - 2), size(x, rank - 1), offset)
    return moved(result, last, axes)


def _placed(x: Tensor, base: Tensor, rows: Size, columns: Size, offset: int) -> Tensor:
    """`base` with the last dimension of `x` on the diagonal of its matrices."""
    down, right = F.unsqueeze(arange(rows), [1]), F.unsqueeze(arange(columns), [0])
    on = F.equal(F.sub(right, down), int64(offset))
    # Above the main diagonal the element's number is its row, below it its column.
    extent = rows if offset >= 0 else columns
    missing = larger(extent - size(x, x.ndim - 1), 0)
    pads: list[Size] = [*[0] * (2 * x.ndim - 1), missing]
    line = kernels.pad(x, pads) if not isinstance(missing, int) or missing else x
    line = F.unsqueeze(line, [x.ndim] if offset >= 0 else [x.ndim - 1])
    return kernels.where(on, line, base)
