"""Helpers of converters: layers in dtypes that engines compute correctly, and refusals at run time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.convert.aten.sizes import END, Size, int64
from intarsia.convert.context import NARROW, Context
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.functional import Operand
from intarsia.network.ops import COUNTS

D = ir.DataType

# Layers that move elements, in dtypes that engines have kernels for. Moving is exact, so a cast around it is
# exact too.

_COPY = {D.BFLOAT16: D.FLOAT}
_PAD = {D.BFLOAT16: D.FLOAT, D.INT16: D.INT32}
_CHOOSE = {**_PAD, D.BOOL: D.UINT8}
_TRIANGLE = {**_PAD, D.INT8: D.INT32, D.UINT8: D.INT32}
# What duplicates are added up in: halves in single precision, as torch's scatter_add does.
_ACCUMULATE = {D.BFLOAT16: D.FLOAT, D.FLOAT16: D.FLOAT, D.INT8: D.INT32, D.UINT8: D.INT32, D.INT16: D.INT32}


def expand(x: Tensor, sizes: Sequence[Size] | Tensor) -> Tensor:
    return F.cast(F.expand(F.cast(x, _COPY.get(x.dtype, x.dtype)), sizes), x.dtype)


def tile(x: Tensor, repeats: Sequence[Size]) -> Tensor:
    return F.cast(F.tile(F.cast(x, _COPY.get(x.dtype, x.dtype)), repeats), x.dtype)


def pad(x: Tensor, pads: Sequence[Size], value: Operand | None = None, mode: str = "constant") -> Tensor:
    carrier = _PAD.get(x.dtype, x.dtype)
    fill = F.cast(value, carrier) if isinstance(value, Tensor) else value
    return F.cast(F.pad(F.cast(x, carrier), pads, value=fill, mode=mode), x.dtype)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    carrier = _CHOOSE.get(a.dtype, a.dtype)
    return F.cast(F.where(condition, F.cast(a, carrier), F.cast(b, carrier)), a.dtype)


def trilu(x: Tensor, diagonal: Size, *, upper: bool) -> Tensor:
    carrier = _TRIANGLE.get(x.dtype, x.dtype)
    return F.cast(F.trilu(F.cast(x, carrier), diagonal, upper=upper), x.dtype)


def nonzero(x: Tensor) -> Tensor:
    """Indices of the elements that are not zero, one column an element."""
    return F.nonzero(x if x.dtype == D.BOOL else F.cast(x, D.BOOL))


# ONNX Runtime's largest, smallest and sign of 64-bit integers go by their lower halves on some processors.
_LONG = frozenset({D.INT64, D.UINT64})


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return F.where(F.less(a, b), b, a) if a.dtype in _LONG else F.maximum(a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return F.where(F.less(b, a), b, a) if a.dtype in _LONG else F.minimum(a, b)


def clip(x: Tensor, low: Operand | None, high: Operand | None) -> Tensor:
    if x.dtype not in _LONG:
        return F.clip(x, low, high)
    for bound, choose in ((low, maximum), (high, minimum)):
        if bound is not None:
            x = choose(x, bound if isinstance(bound, Tensor) else F.constant(bound, x.dtype))
    return x


def sign(x: Tensor) -> Tensor:
    if x.dtype not in _LONG:
        return F.sign(x)
    return F.sub(F.cast(F.less(0, x), x.dtype), F.cast(F.less(x, 0), x.dtype))


def accumulator(dtype: ir.DataType) -> ir.DataType:
    """The dtype to add up elements of `dtype` in; bool counts as numbers and is cast back at the end."""
    return D.INT32 if dtype == D.BOOL else _ACCUMULATE.get(dtype, dtype)


# The dtype a converter computes in, where engines have no kernel for torch's own or round too often.

_SMALL = NARROW | {ir.DataType.BOOL}


def wide(x: Tensor, *, halves: bool = False) -> Tensor:
    """`x` where torch accumulates: bfloat16 (and float16, if asked) in float32, small integers in int32.

    Booleans, too, are integers here; cast back, whatever is not zero is true.

    torch computes on bfloat16 in float32 and rounds once, and engines hardly have bfloat16 kernels.
    Small integers wrap: computing modulo 2**32 and cutting off the top bits gives the same.
    """
    if x.dtype == ir.DataType.BFLOAT16 or (halves and x.dtype == ir.DataType.FLOAT16):
        return F.cast(x, ir.DataType.FLOAT)
    return F.cast(x, ir.DataType.INT32) if x.dtype in _SMALL else x


def on_cpu(ctx: Context) -> bool:
    """Whether torch computes this on a CPU, where float16 costs precision and gains nothing."""
    value = ctx.value[0] if isinstance(ctx.value, tuple | list) else ctx.value
    return bool(value.device.type == "cpu")


def is_float(x: Tensor) -> bool:
    return x.dtype in dtypes.FLOATS


def static(x: Tensor, axis: int) -> int:
    """The size of `x` along an axis, which must be known when the network is made."""
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ConversionError(f"the size {size} of dimension {axis} is not known at compile time")
    return size


def whole(values: Any, what: str) -> list[int]:
    """Integers that must be known when the network is made."""
    items = list(values) if isinstance(values, list | tuple) else [values]
    if not all(isinstance(item, int) for item in items):
        raise ConversionError(f"{what}={items} is not known at compile time")
    return items


def per_axis(values: Any, rank: int, what: str) -> list[int]:
    """A number for each axis, given once for all or each."""
    items = whole(values, what)
    return items * rank if len(items) == 1 else items


def axes_of(dim: Any, rank: int) -> list[int]:
    """Dimensions counted from the front; None and [] mean all of them."""
    if dim is None or dim == []:
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({axis % max(rank, 1) for axis in dims}) if rank else []


def used(node: Any, index: int) -> bool:
    """Whether a node reads the output of this number; an unread output is not computed."""
    if node is None:
        return True
    return any(user.target is not operator.getitem or user.args[1] == index for user in node.users)


def with_further(ctx: Context, first: Tensor, further: Callable[[], Sequence[Tensor]] | None = None) -> Any:
    """The first result; and, of an operator with more, those that `further` computes, if one is read."""
    if not isinstance(ctx.value, tuple | list):
        return first
    rest: list[Tensor] = []
    if any(used(ctx.node, index) for index in range(1, len(ctx.value))):
        if further is None:
            raise ConversionError(f"results of {ctx.name} that only training needs are not handled")
        rest = [F.cast(x, value.dtype) for x, value in zip(further(), ctx.value[1:], strict=False)]
    return (first, *rest, *[None] * (len(ctx.value) - 1 - len(rest)))


def is_empty(*tensors: Tensor) -> bool:
    """Whether an operand is known to have no elements, though the result has: kernels disagree about those.

    Results without elements reach no converter.
    """
    return any(0 in x.shape for x in tensors)


def filled(ctx: Context, value: float = 0, output: int | None = None) -> Tensor:
    """torch's result for empty operands: filled with one value, or empty."""
    result = ctx.value if output is None else ctx.value[output]
    sizes = whole(list(result.shape), "a size")
    return F.full(sizes, value, result.dtype)


# Sums and products of integers: exact, and wrapping where torch wraps. ONNX Runtime reduces 64-bit integers
# in float64 and OpenVINO integers in float32; running sums, and sums and products of two, are exact in both.


def sum_of_integers(x: Tensor, axes: Sequence[int], *, keepdims: bool = False) -> Tensor:
    """The last of running sums, one dimension after the other."""
    for axis in axes:
        if not isinstance(x.shape[axis], int):
            # Of no elements there is no last sum: a zero goes ahead.
            zero = F.mul(F.reduce_sum(x, [axis], keepdims=True), 0)
            x = F.concat([zero, x], axis)
        if x.shape[axis] != 1:
            x = F.slice(F.cumsum(x, axis), -1, END, axis=axis)
    return x if keepdims else F.squeeze(x, axes)


def summed_up(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The sum over dimensions, which are removed; exact for integers."""
    # Fewer than 2**22 of smaller ones add up to what a float64 holds.
    return sum_of_integers(x, axes) if x.dtype in dtypes.LONG else F.reduce_sum(x, axes, keepdims=False)


def product_of_integers(x: Tensor, axes: Sequence[int], *, keepdims: bool = False) -> Tensor:
    """The product of the first half with the second, repeated until one element is left."""
    for axis in axes:
        count = static(x, axis)
        while count > 1:
            half = count // 2
            pairs = F.mul(F.slice(x, 0, half, axis=axis), F.slice(x, half, 2 * half, axis=axis))
            x = F.concat([pairs, F.slice(x, count - 1, END, axis=axis)], axis) if count % 2 else pairs
            count -= half
    return x if keepdims else F.squeeze(x, axes)


# What torch demands of values, put as indices. Engines check that indices lie inside (ONNX Runtime by itself,
# OpenVINO by a guard). They leave a call in which one does not to PyTorch, which raises its own error or
# answers.


def from_the_front(index: Tensor, extent: Size) -> Tensor:
    """Indices of a dimension that must not be negative, where engines would count those from the end."""
    known = index.constant
    if known is not None:
        if known.size and known.min() < 0:
            raise ConversionError(f"the index {int(known.min())}, which torch refuses, is not handled")
        return F.constant(known.astype(np.int64))
    index = F.cast(index, D.INT64)
    parent = index.get_parent()
    if parent is not None and parent.kind in COUNTS:
        return index
    return F.where(F.less(index, 0), int64(extent), index)


def zero_unless(condition: Tensor) -> Tensor:
    """The number 0, int64 and 0-d; a call in which the condition holds anywhere is left to PyTorch."""
    held = F.cast(condition, D.INT32)
    if held.ndim:
        held = F.reshape(held, [-1])
        if not isinstance(held.shape[0], int):  # of no elements there is no largest
            held = F.concat([F.constant(np.zeros(1, np.int32)), held], 0)
        held = F.reduce_max(held, [0], keepdims=False)
    # There is no element 1 of one element.
    return F.gather(F.constant(np.zeros(1, np.int64)), F.cast(held, D.INT64), 0)


def left_where(x: Tensor, condition: Tensor) -> Tensor:
    """`x` itself; a call in which the condition holds anywhere is left to PyTorch."""
    return F.sub(x, F.cast(zero_unless(condition), x.dtype))  # less 0, which also keeps -0.0
