"""Layers that move elements, in dtypes engines have kernels for: moving is exact, so a detour is too."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from intarsia.convert.aten.sizes import Size
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.network.functional import Operand

D = ir.DataType
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
