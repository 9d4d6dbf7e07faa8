"""Sizes that are numbers now, or 0-d tensors when the network runs, and helpers of converters for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from intarsia.convert.context import Context
from intarsia.convert.interpreter import shape_of
from intarsia.errors import ConversionError
from intarsia.network import Shape, Tensor
from intarsia.network import functional as F

Size = int | Tensor
END = 2**63 - 1  # "up to the end" of a slice, whatever the size


def wrap(dim: int, rank: int) -> int:
    """A dimension counted from the front, as torch counts: a 0-d tensor has one."""
    span = max(rank, 1)
    if not -span <= dim < span:
        raise ConversionError(f"dim={dim} is outside a tensor of {rank} dimensions")
    return dim % span


def size(x: Tensor, axis: int) -> Size:
    """One size of a tensor: a number where it is known."""
    known = x.shape[axis]
    return known if isinstance(known, int) else F.size(x, axis)


def sizes(x: Tensor) -> list[Size]:
    return [size(x, axis) for axis in range(x.ndim)]


def result_shape(ctx: Context) -> Shape:
    """The sizes torch gives the result, symbols by name."""
    return shape_of(ctx.value)


def floor_divide(a: Size, b: int) -> Size:
    """`a // b` of a size that is not negative by a positive number."""
    return a // b if isinstance(a, int) else F.div(a, b)


def ceil_divide(a: Size, b: int) -> Size:
    return floor_divide(a + (b - 1), b)


def modulo(a: Size, b: Size) -> Size:
    """Python's `a % b`; 0 where b is 0, so that empty tensors pass."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else 0
    return F.mod(int64(a), larger(b, 1) if isinstance(b, Tensor) else int64(b))


def smaller(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return F.minimum(int64(a), int64(b))


def larger(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return F.maximum(int64(a), int64(b))


def from_front(index: Size, extent: Size) -> Size:
    """An index that may count from the end, counted from the front."""
    if isinstance(index, int):
        return index + extent if index < 0 else index
    return F.where(F.less(index, 0), F.add(index, extent), index)


def clamped(index: Size, extent: Size) -> Size:
    """A bound of a slice, as torch reads it: from the front, and inside the tensor."""
    if isinstance(index, int) and index == 0:
        return 0
    if isinstance(index, int) and index >= END:
        return extent
    return larger(smaller(from_front(index, extent), extent), 0)


def int64(value: Size) -> Tensor:
    return value if isinstance(value, Tensor) else F.constant(value, ir.DataType.INT64)


def arange(count: Size, start: Size = 0, step: Size = 1) -> Tensor:
    """`start, start + step, ...`, as many as asked for; a constant where all is known."""
    if isinstance(count, int) and isinstance(start, int) and isinstance(step, int):
        return F.constant(start + step * np.arange(count, dtype=np.int64))
    numbers = F.arange(0, count, 1, ir.DataType.INT64)
    if step != 1:
        numbers = F.mul(numbers, int64(step))
    return numbers if start == 0 else F.add(numbers, int64(start))


def total(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors of places; a constant where both are."""
    left, right = a.constant, b.constant
    return F.add(a, b) if left is None or right is None else F.constant(left + right)


def reshape(x: Tensor, wanted: Sequence[Size], shape: Shape | None = None) -> Tensor:
    """`x` in other sizes; `shape` is what torch knows of them, which may save computing them at run time."""
    known: Shape = shape if shape is not None else tuple(s if isinstance(s, int) else None for s in wanted)
    if known == x.shape and None not in known:
        return x
    if all(isinstance(d, int) for d in known):
        return F.reshape(x, [int(d) for d in known])  # type: ignore[arg-type]
    plain = _without_computing(x.shape, known)
    if plain is not None:
        return F.reshape(x, plain, keep_zeros=True)
    return F.reshape(
        x, [w if d is None or isinstance(d, str) else d for w, d in zip(wanted, known, strict=True)]
    )


def _without_computing(have: Shape, known: Shape) -> list[int] | None:
    # A 0 keeps the input's size at that place; one size may be left open, yet not next to a size that
    # may turn out to be 0.
    plain: list[int] = []
    for place, dim in enumerate(known):
        if isinstance(dim, int):
            plain.append(dim if dim else -2)
        elif isinstance(dim, str) and place < len(have) and have[place] == dim:
            plain.append(0)
        else:
            plain.append(-1)
    if -2 in plain or plain.count(-1) > 1 or (-1 in plain and 0 in plain):
        return None
    return plain
