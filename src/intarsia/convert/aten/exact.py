"""Sums and products of integers: exact, and wrapping where torch wraps.

ONNX Runtime reduces 64-bit integers in float64, OpenVINO integers in float32; running sums, sums and
products of two are exact in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from intarsia.convert.aten.precision import static
from intarsia.convert.aten.sizes import END
from intarsia.network import Tensor
from intarsia.network import functional as F

# Fewer than 2**22 of smaller ones add up to what a float64 holds.
LONG = frozenset({ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64})


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
    """The sum over dimensions that go away, exact of integers."""
    return sum_of_integers(x, axes) if x.dtype in LONG else F.reduce_sum(x, axes, keepdims=False)


def product_of_integers(x: Tensor, axes: Sequence[int], *, keepdims: bool = False) -> Tensor:
    """Halves multiplied with each other until one is left."""
    for axis in axes:
        count = static(x, axis)
        while count > 1:
            half = count // 2
            pairs = F.mul(F.slice(x, 0, half, axis=axis), F.slice(x, half, 2 * half, axis=axis))
            x = F.concat([pairs, F.slice(x, count - 1, END, axis=axis)], axis) if count % 2 else pairs
            count -= half
    return x if keepdims else F.squeeze(x, axes)
