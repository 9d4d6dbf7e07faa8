"""In which dtype a converter computes where engines have no kernel for torch's own, or round too often."""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir

from intarsia.convert.context import ConversionContext
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

HALVES = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
_SMALL = frozenset(
    {ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.BOOL}
)


def wide(x: Tensor, *, halves: bool = False) -> Tensor:
    """`x` where torch accumulates: bfloat16 (and float16, if asked) in float32, small integers in int32.

    Booleans, too, are integers here; cast back, whatever is not zero is true.

    torch computes on bfloat16 in float32 and rounds once, and engines hardly have bfloat16 kernels.
    Small integers wrap: computing modulo 2**32 and cutting off the top bits gives the same.
    """
    if x.dtype == ir.DataType.BFLOAT16 or (halves and x.dtype == ir.DataType.FLOAT16):
        return F.cast(x, ir.DataType.FLOAT)
    return F.cast(x, ir.DataType.INT32) if x.dtype in _SMALL else x


def on_cpu(ctx: ConversionContext) -> bool:
    """Whether torch computes this on a CPU, where float16 costs precision and gains nothing."""
    made = ctx.value[0] if isinstance(ctx.value, tuple | list) else ctx.value
    return bool(made.device.type == "cpu")


def is_float(x: Tensor) -> bool:
    return x.dtype in dtypes.FLOATS


def static(x: Tensor, axis: int) -> int:
    """The size of `x` along an axis, which must be known when the network is made."""
    size = x.shape[axis]
    if not isinstance(size, int):
        raise ConversionError(f"the size {size} of dimension {axis} is not known ahead")
    return size


def whole(values: Any, what: str) -> list[int]:
    """Integers that must be known when the network is made."""
    items = list(values) if isinstance(values, list | tuple) else [values]
    if not all(isinstance(item, int) for item in items):
        raise ConversionError(f"{what}={items} is not known ahead")
    return items


def axes_of(dim: Any, rank: int) -> list[int]:
    """Dimensions counted from the front; None and [] mean all of them."""
    if dim is None or dim == []:
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({axis % max(rank, 1) for axis in dims}) if rank else []


def used(node: Any, index: int) -> bool:
    """Whether anything reads the output of this number; what nobody reads need not be made."""
    if node is None:
        return True
    return any(user.target is not operator.getitem or user.args[1] == index for user in node.users)


def is_empty(*tensors: Tensor) -> bool:
    """Whether a tensor is known to have no elements; kernels disagree about those, so none is asked."""
    return any(0 in x.shape for x in tensors)


def filled(ctx: ConversionContext, value: float = 0, output: int | None = None) -> Tensor:
    """What torch makes of nothing: a result of one value (or of none), whatever the operands hold."""
    made = ctx.value if output is None else ctx.value[output]
    sizes = whole(list(made.shape), "a size")
    return F.full(sizes, value, made.dtype)
