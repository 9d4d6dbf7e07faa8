"""Quantisation as pt2e writes it: integers beside their scale and zero point."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

try:  # the operators exist once this module of torch is loaded; a torch without it has none to convert
    import torch.ao.quantization.fx._decomposed  # type: ignore[import-not-found,unused-ignore]

    HAS_QUANTIZED = hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")
except ImportError:
    HAS_QUANTIZED = False

aten = torch.ops.aten
_RANGES = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}


def _limits(ctx: Context, quant_min: Any, quant_max: Any) -> tuple[int, int]:
    low, high = _number(quant_min, "quant_min"), _number(quant_max, "quant_max")
    if ctx.dtype not in _RANGES:
        raise ConversionError(f"dtype={ctx.torch_dtype} is not handled")
    return low, high


def _number(value: Any, name: str) -> int:
    if isinstance(value, Tensor):
        if value.constant is None:
            raise ConversionError(f"a {name} that is computed is not handled")
        return int(value.constant)
    return int(value)


def _scale(value: Any) -> Tensor:
    # torch's per-tensor scales are double; the products are float32 all the same.
    return F.cast(value, torch.float32) if isinstance(value, Tensor) else F.constant(value, torch.float32)


def _flat(value: Tensor) -> Tensor:
    """A scale or zero point of one element as ONNX wants it for a whole tensor: 0-d."""
    return value if value.ndim == 0 else F.reshape(value, [])


def _zero_point(value: Any, dtype: ir.DataType) -> Tensor:
    return F.cast(value, dtype) if isinstance(value, Tensor) else F.constant(value, dtype)


def _inverse(scale: Any) -> Tensor:
    """One over the scale, rounded once to float32; a constant where it can be.

    ONNX Runtime would make `x / s` of a product with a quotient that it sees.
    """
    known = scale.constant if isinstance(scale, Tensor) else scale
    if known is None:
        return F.cast(F.reciprocal(scale), ir.DataType.FLOAT)
    return F.constant(1.0 / np.asarray(known).astype(np.float64), ir.DataType.FLOAT)


def _steps(x: Tensor, inverse: Tensor, zero_point: Tensor, limits: tuple[int, int]) -> Tensor:
    """How many steps of the scale, in float32: exactly torch's arithmetic.

    Quantising layers divide where torch multiplies by the reciprocal: where quotient and product straddle
    a half, the integers would differ by one.
    """
    steps = F.add(F.round(F.mul(x, inverse)), zero_point)
    return F.clip(steps, float(limits[0]), float(limits[1]))


def _along(values: Tensor, axis: int, rank: int) -> Tensor:
    """One number for every channel, shaped to meet a tensor of channels."""
    return F.reshape(values, [-1 if i == axis % rank else 1 for i in range(rank)])


def dequantized(x: Tensor, scale: Tensor, zero_point: Any, axis: int | None, out_dtype: Any) -> Tensor:
    """In float32, which both engines and torch compute in."""
    if out_dtype not in (None, torch.float32):
        raise ConversionError(f"out_dtype={out_dtype} is not handled")
    if x.dtype not in _RANGES:
        raise ConversionError(f"dtype={x.dtype.name} is not handled")
    if zero_point is None or _fits(zero_point, x.dtype):
        zero = None if zero_point is None else _zero_point(zero_point, x.dtype)
        return F.dequantize_linear(x, scale, zero, axis=axis)
    zero = _zero_point(zero_point, ir.DataType.FLOAT)
    if axis is not None:
        scale, zero = (_along(values, axis, x.ndim) for values in (scale, zero))
    return F.mul(F.sub(F.cast(x, ir.DataType.FLOAT), zero), scale)


def _fits(zero_point: Any, dtype: ir.DataType) -> bool:
    """Whether a zero point is known to be one of the integers, as ONNX wants it; torch takes any number."""
    known = zero_point.constant if isinstance(zero_point, Tensor) else zero_point
    if known is None:
        return False
    numbers, (low, high) = np.asarray(known), _RANGES[dtype]
    return bool(np.all((numbers >= low) & (numbers <= high) & (numbers == np.round(numbers))))


if HAS_QUANTIZED:
    q = torch.ops.quantized_decomposed

    @converter(q.quantize_per_tensor.default, q.quantize_per_tensor.tensor, q.quantize_per_tensor.tensor2)
    def quantize_per_tensor(
        ctx: Context, input: Tensor, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: Any
    ) -> Tensor:
        limits = _limits(ctx, quant_min, quant_max)
        zero = _flat(_zero_point(zero_point, ir.DataType.FLOAT))
        x = F.cast(input, ir.DataType.FLOAT)
        return F.cast(_steps(x, _flat(_inverse(scale)), zero, limits), ctx.dtype)

    @converter(
        q.dequantize_per_tensor.default, q.dequantize_per_tensor.tensor, q.dequantize_per_tensor.tensor2
    )
    def dequantize_per_tensor(
        ctx: Context,
        input: Tensor,
        scale: Any,
        zero_point: Any,
        quant_min: Any,
        quant_max: Any,
        dtype: Any,
        *,
        out_dtype: Any = None,
    ) -> Tensor:
        zero = _flat(zero_point) if isinstance(zero_point, Tensor) else zero_point
        return dequantized(input, _flat(_scale(scale)), zero, None, out_dtype)

    @converter(q.quantize_per_channel.default)
    def quantize_per_channel(
        ctx: Context,
        input: Tensor,
        scales: Tensor,
        zero_points: Tensor,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: Any,
    ) -> Tensor:
        limits = _limits(ctx, quant_min, quant_max)
        if scales.dtype == ir.DataType.DOUBLE:
            raise ConversionError("scales in float64 are not handled: torch then multiplies in float64")
        inverse, zero = _inverse(scales), F.cast(zero_points, ir.DataType.FLOAT)
        inverse, zero = (_along(values, axis, input.ndim) for values in (inverse, zero))
        return F.cast(_steps(F.cast(input, ir.DataType.FLOAT), inverse, zero, limits), ctx.dtype)

    @converter(q.dequantize_per_channel.default)
    def dequantize_per_channel(
        ctx: Context,
        input: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: Any,
        *,
        out_dtype: Any = None,
    ) -> Tensor:
        return dequantized(input, _scale(scales), zero_points, axis, out_dtype)


def _fake(x: Tensor, scale: Tensor, zero_point: Tensor, inverse: Tensor, limits: tuple[int, int]) -> Tensor:
    """Round to the grid and stay in float32, no integer type needed."""
    return F.mul(F.sub(_steps(x, inverse, zero_point, limits), zero_point), scale)


@converter(aten.fake_quantize_per_tensor_affine.default, aten.fake_quantize_per_tensor_affine.tensor_qparams)
def fake_quantize_per_tensor(
    ctx: Context, self: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Tensor:
    _float_only(self)
    zero = _flat(_zero_point(zero_point, ir.DataType.FLOAT))
    scale = _flat(_scale(scale))
    return _fake(self, scale, zero, _inverse(scale), (quant_min, quant_max))


@converter(aten.fake_quantize_per_channel_affine.default)
def fake_quantize_per_channel(
    ctx: Context, self: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    _float_only(self)
    scale, zero = _scale(scale), F.cast(zero_point, torch.float32)
    inverse = _inverse(scale)
    scale, zero, inverse = (_along(values, axis, self.ndim) for values in (scale, zero, inverse))
    return _fake(self, scale, zero, inverse, (quant_min, quant_max))


def _float_only(x: Tensor) -> None:
    if x.dtype != ir.DataType.FLOAT:
        raise ConversionError(f"fake quantisation of {x.dtype.name} is not handled")
