"""Functionals that move elements: reshape, transpose, concat, slice, gather, scatter, pad."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from intarsia.network.functional.core import DTypeLike, Operand, Scalar, as_dtype, constant, ints, op, ops
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature

Size = int | Tensor  # a constant size, or a 0-d int64 tensor


def size_vector(sizes: Sequence[Size]) -> Tensor:
    """A vector of sizes, constant if all are."""
    if all(isinstance(size, int) for size in sizes):
        return ints([int(size) for size in sizes])  # type: ignore[arg-type]
    parts = [ints([size]) if isinstance(size, int) else op("Unsqueeze", size, ints([0])) for size in sizes]
    return parts[0] if len(parts) == 1 else op("Concat", *parts, axis=0)


@record_signature
def shape(x: Tensor) -> Tensor:
    """The sizes of `x` as a vector of int64."""
    return op("Shape", x)


@record_signature
def size(x: Tensor, axis: int) -> Tensor:
    """One size of `x` as a 0-d int64."""
    axis %= x.ndim
    return op("Squeeze", op("Shape", x, start=axis, end=axis + 1), ints([0]))


@record_signature
def reshape(x: Tensor, sizes: Sequence[Size] | Tensor, *, keep_zeros: bool = False) -> Tensor:
    """`x` with other sizes; one may be -1. A 0 means 0, or x's own size at that axis with `keep_zeros`."""
    target = sizes if isinstance(sizes, Tensor) else size_vector(sizes)
    if keep_zeros:
        return op("Reshape", x, target)
    values = target.constant
    zero = values is not None and 0 in values
    if not zero and values is not None:
        return op("Reshape", x, target)
    # ONNX reads a 0 as "copy the input's size" unless `allowzero` is set, which excludes a -1.
    if values is not None and -1 in values:
        values = np.where(values == -1, _missing_size(x, values), values)
        return op("Reshape", x, ints([int(d) for d in values]), allowzero=1)
    allow_zero = values is not None or not isinstance(sizes, Sequence) or -1 not in sizes
    return op("Reshape", x, target, allowzero=1 if allow_zero else None)


def _missing_size(x: Tensor, wanted: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
    # Of an empty tensor: torch takes 0 for the open size if the others leave no choice.
    rest = int(np.prod([int(d) for d in wanted if d != -1]))
    total = int(np.prod([int(d) for d in x.shape]))  # type: ignore[arg-type]
    return total // rest if rest else 0


@record_signature
def transpose(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x` with its dimensions in another order."""
    return op("Transpose", x, perm=[axis % max(x.ndim, 1) for axis in order])


@record_signature
def unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    """`x` with dimensions of size 1 inserted."""
    return op("Unsqueeze", x, ints(axes))


@record_signature
def squeeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    """`x` without these dimensions of size 1."""
    return op("Squeeze", x, ints(axes))


@record_signature
def expand(x: Tensor, sizes: Sequence[Size] | Tensor) -> Tensor:
    """`x` broadcast to these sizes. As in ONNX, sizes of 1 are broadcast to x's own."""
    return op("Expand", x, sizes if isinstance(sizes, Tensor) else size_vector(sizes))


@record_signature
def tile(x: Tensor, repeats: Sequence[Size]) -> Tensor:
    """`x` repeated along each dimension."""
    return op("Tile", x, size_vector(repeats))


@record_signature
def concat(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors concatenated along an axis."""
    return op("Concat", *tensors, axis=axis)


@record_signature
def split(x: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    """`x` split along an axis into pieces of these sizes."""
    return ops("Split", x, ints(sizes), outputs=len(sizes), axis=axis)


@record_signature
def slice(x: Tensor, start: Size, end: Size, *, axis: int, step: int = 1) -> Tensor:
    """`x[start:end:step]` along one axis."""
    return op("Slice", x, size_vector([start]), size_vector([end]), ints([axis]), ints([step]))


@record_signature
def gather(x: Tensor, indices: Operand, axis: int = 0) -> Tensor:
    """Rows of `x` along an axis, one for each index."""
    return op(
        "Gather",
        x,
        indices if isinstance(indices, Tensor) else constant(indices, ir.DataType.INT64),
        axis=axis,
    )


@record_signature
def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Elements of `x` along an axis, one for each index, as torch.gather."""
    return op("GatherElements", x, indices, axis=axis)


@record_signature
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    """Slices of `x` at the index tuples in the last dimension of `indices`."""
    return op("GatherND", x, indices, batch_dims=batch_dims or None)


@record_signature
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str | None = None
) -> Tensor:
    """`x` with elements along an axis overwritten or reduced (`add`, `mul`, `max`, `min`)."""
    return op("ScatterElements", x, indices, updates, axis=axis, reduction=reduction)


@record_signature
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str | None = None) -> Tensor:
    """`x` with slices at index tuples overwritten or reduced."""
    return op("ScatterND", x, indices, updates, reduction=reduction)


@record_signature
def pad(x: Tensor, pads: Sequence[Size], *, value: Operand | None = None, mode: str = "constant") -> Tensor:
    """`x` padded; `pads` holds all begins, then all ends."""
    fill = None if value is None or isinstance(value, Tensor) else constant(value, x.dtype)
    if isinstance(value, Tensor):
        fill = value
    return op("Pad", x, size_vector(pads), fill, mode=mode)


@record_signature
def full(sizes: Sequence[Size], value: Scalar, dtype: DTypeLike) -> Tensor:
    """A tensor of one value."""
    array = np.asarray([value]).astype(as_dtype(dtype).numpy())
    return op("ConstantOfShape", size_vector(sizes), value=ir.Tensor(array, dtype=as_dtype(dtype)))


@record_signature
def arange(start: Operand, end: Operand, step: Operand, dtype: DTypeLike) -> Tensor:
    """Numbers from `start` to `end`, without `end`."""
    wanted = as_dtype(dtype)

    def number(value: Operand) -> Tensor:
        if not isinstance(value, Tensor):
            return constant(value, wanted)
        return value if value.dtype == wanted else op("Cast", value, to=wanted)

    return op("Range", number(start), number(end), number(step))


@record_signature
def nonzero(x: Tensor) -> Tensor:
    """Indices of the nonzero elements, one column for each."""
    return op("NonZero", x)


@record_signature
def trilu(x: Tensor, diagonal: Size = 0, *, upper: bool) -> Tensor:
    """The upper or lower triangle of the last two dimensions."""
    k = diagonal if isinstance(diagonal, Tensor) else constant(diagonal, ir.DataType.INT64)
    return op("Trilu", x, k, upper=1 if upper else 0)
