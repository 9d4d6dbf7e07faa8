"""Tensors created without inputs: one value, ranges, identity matrices, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten import kernels
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten

Sizes = Sequence[int | Tensor]
SMALL = 64  # elements below which a constant says it plainly


def filled(sizes: Sizes | Tensor, value: Any, dtype: ir.DataType) -> Tensor:
    """A tensor of one value; the value, too, may be known only when the network runs."""
    if isinstance(value, Tensor):
        return kernels.expand(F.cast(value, dtype), sizes)
    if isinstance(sizes, Tensor):
        array = np.asarray([value]).astype(dtype.numpy())
        return F.op("ConstantOfShape", sizes, value=ir.Tensor(array, dtype=dtype))
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes) and 0 < int(np.prod(known)) <= SMALL:
        return F.constant(np.full(known, value), dtype)
    return F.full(sizes, value, dtype)


def literal(value: torch.Tensor) -> Tensor:
    """The value that torch computed, as a constant; OpenVINO treats an empty constant as a number."""
    return F.constant(value) if value.numel() else F.full(tuple(value.shape), 0, value.dtype)


def filled_like(x: Tensor, value: Any, dtype: ir.DataType) -> Tensor:
    """A tensor of one value in the shape of another."""
    known = [size for size in x.shape if isinstance(size, int)]
    return filled(known if len(known) == x.ndim else F.shape(x), value, dtype)


# What an empty tensor holds is anybody's choice; ours is zero, the same at every call. `dtype` is named
# because it may be given; what it comes to is the context's.
@converter(
    *(aten.full.default, aten.new_full.default, aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor),
    *(aten.ones.default, aten.new_ones.default, aten.ones_like.default),
    *(aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.zero.default),
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default),
)
def one_value(
    ctx: Context,
    self: Tensor | None = None,
    size: Sizes | None = None,
    fill_value: Any = None,
    value: Any = None,
    stride: Sizes = (),
    physical_layout: Any = (),
    *,
    dtype: Any = None,
) -> Tensor:
    named = value if fill_value is None else fill_value
    content = int("ones" in ctx.operator) if named is None else named
    if size is not None:
        return filled(size, content, ctx.dtype)
    assert self is not None
    return filled_like(self, content, ctx.dtype)


@converter(aten.scalar_tensor.default)
def scalar_tensor(ctx: Context, s: Any, *, dtype: Any = None) -> Tensor:
    return ctx.tensor(s, ctx.dtype)


# Ranges and patterns of indices: arange, linspace, identity matrices, triangles.

INT64 = ir.DataType.INT64


@converter(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(ctx: Context, end: Any, start: Any = 0, step: Any = 1, *, dtype: Any = None) -> Tensor:
    if not any(isinstance(bound, Tensor) for bound in (start, end, step)):
        return literal(torch.arange(start, end, step, dtype=ctx.torch_dtype))
    # A whole number written as a float makes the same steps.
    start, end, step = (int(x) if isinstance(x, float) and x.is_integer() else x for x in (start, end, step))
    for bound in (start, end, step):
        if isinstance(bound, float) or (isinstance(bound, Tensor) and bound.dtype != INT64):
            raise ConversionError(
                f"a range from {start} to {end} by {step}, which are not all integers, is not handled"
            )
    return F.cast(F.arange(start, end, step, INT64), ctx.dtype)


@converter(aten.linspace.default, aten.logspace.default)
def spaced(
    ctx: Context, start: Any, end: Any, steps: Any, base: float = 10.0, *, dtype: Any = None
) -> Tensor:
    for name, value in (("start", start), ("end", end), ("steps", steps)):
        if isinstance(value, Tensor):
            raise ConversionError(f"{name} known only at run time is not handled")
    if ctx.operator == "linspace":
        return literal(torch.linspace(start, end, steps, dtype=ctx.torch_dtype))
    return literal(torch.logspace(start, end, steps, base, dtype=ctx.torch_dtype))
