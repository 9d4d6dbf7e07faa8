"""Quantization as pt2e writes it, and products with low-bit weights as lowering writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import from_the_front, wide
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F
from intarsia.quantized import EMBEDDING, INTEGER_LINEAR, LINEAR

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
            raise ConversionError(f"a {name} that is not a constant is not handled")
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


def _as_layer(ctx: Context, x: Tensor, scale: Any, zero_point: Any, limits: tuple[int, int]) -> Tensor | None:
    """Rounding as one layer, for engines that compute in integers: they fuse it with what reads it.

    That divides where torch multiplies by the reciprocal: an integer here and there differs by one, which
    such engines may. None where no layer says the same, or the engine is exact.
    """
    if getattr(ctx.engine, "arithmetic", "") != "int8" or _RANGES.get(ctx.dtype) != limits:
        return None
    known = [value.constant if isinstance(value, Tensor) else value for value in (scale, zero_point)]
    if any(value is None or np.size(value) != 1 for value in known) or not _fits(zero_point, ctx.dtype):
        return None
    step, zero = (np.asarray(value).item() for value in known)
    if not 0.0 < step < np.inf:
        return None
    return F.quantize_linear(x, F.constant(step, torch.float32), F.constant(int(zero), ctx.dtype))


def _fits(zero_point: Any, dtype: ir.DataType) -> bool:
    """Whether a zero point is known to be one of the integers, as ONNX wants it; torch takes any number."""
    known = zero_point.constant if isinstance(zero_point, Tensor) else zero_point
    if known is None:
        return False
    numbers, (low, high) = np.asarray(known), _RANGES[dtype]
    return bool(np.all((numbers >= low) & (numbers <= high) & (numbers == np.round(numbers))))


if HAS_QUANTIZED:
    q = torch.ops.quantized_decomposed

    @converter(
        *(q.quantize_per_tensor.default, q.quantize_per_tensor.tensor, q.quantize_per_tensor.tensor2),
        q.quantize_per_channel.default,
    )
    def quantize(
        ctx: Context, input: Tensor, quant_min: Any, quant_max: Any, dtype: Any,
        scale: Any = None, zero_point: Any = None,
        scales: Tensor | None = None, zero_points: Tensor | None = None, axis: int | None = None,
    ) -> Tensor:  # fmt: skip
        """By one scale, or by one for each channel along an axis."""
        limits, x = _limits(ctx, quant_min, quant_max), F.cast(input, ir.DataType.FLOAT)
        if scales is None or zero_points is None or axis is None:
            if (layer := _as_layer(ctx, x, scale, zero_point, limits)) is not None:
                return layer
            inverse, zero = _flat(_inverse(scale)), _flat(_zero_point(zero_point, ir.DataType.FLOAT))
        else:
            if scales.dtype == ir.DataType.DOUBLE:
                raise ConversionError("scales in float64 are not handled: torch then multiplies in float64")
            numbers = (_inverse(scales), F.cast(zero_points, ir.DataType.FLOAT))
            inverse, zero = (_along(values, axis, input.ndim) for values in numbers)
        return F.cast(_steps(x, inverse, zero, limits), ctx.dtype)

    @converter(
        *(q.dequantize_per_tensor.default, q.dequantize_per_tensor.tensor, q.dequantize_per_tensor.tensor2),
        q.dequantize_per_channel.default,
    )
    def dequantize(
        ctx: Context, input: Tensor, quant_min: Any, quant_max: Any, dtype: Any,
        scale: Any = None, zero_point: Any = None,
        scales: Tensor | None = None, zero_points: Tensor | None = None, axis: int | None = None,
        *, out_dtype: Any = None,
    ) -> Tensor:  # fmt: skip
        """By one scale, or by one for each channel along an axis."""
        if axis is not None:
            return dequantized(input, _scale(scales), zero_points, axis, out_dtype)
        zero = _flat(zero_point) if isinstance(zero_point, Tensor) else zero_point
        return dequantized(input, _flat(_scale(scale)), zero, None, out_dtype)


@converter(
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_tensor_affine.tensor_qparams,
    aten.fake_quantize_per_channel_affine.default,
)
def fake_quantize(
    ctx: Context,
    self: Tensor,
    scale: Any,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
) -> Tensor:
    """Round to the grid and stay in float32, no integer type needed."""
    if self.dtype != ir.DataType.FLOAT:
        raise ConversionError(f"fake quantization of {self.dtype.name} is not handled")
    scale, zero = _scale(scale), _zero_point(zero_point, ir.DataType.FLOAT)
    numbers = (scale, zero, _inverse(scale))
    scale, zero, inverse = (_flat(x) if axis is None else _along(x, axis, self.ndim) for x in numbers)
    return F.mul(F.sub(_steps(self, inverse, zero, (quant_min, quant_max)), zero), scale)


# Products with weights in few bits, which lowering found (`lower/packing.py`).

_BLOCKS = (16, 32, 64, 128, 256)  # columns that share a scale in `MatMulNBits`


@converter(LINEAR)
def quantized_linear(ctx: Context, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
    x, weight, scale, zero, bias, bits = args
    _constants_only(weight, scale, zero)
    if weight.is_floating_point():
        raise ConversionError(
            f"a weight of {weight.dtype} would be held as float32: there is no product that reads it as it is"
        )
    x = wide(ctx.tensor(x))
    if x.dtype != ir.DataType.FLOAT:
        raise ConversionError(f"activations of {x.dtype.name} are not handled")
    added = None if bias is None else wide(ctx.tensor(bias))
    return F.cast(_product(x, weight, scale, zero, added, bits), ctx.dtype)


def _product(
    x: Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: Tensor | None,
    bits: int,
) -> Tensor:
    """Of activations in float32 with a weight in the layout of `intarsia.quantized`."""
    columns: Any = x.shape[-1]
    block = weight.shape[2] * 8 // bits
    if weight.shape[1] == 1:  # a row: in blocks of a size that kernels know
        block = next((size for size in _BLOCKS if size >= columns), _BLOCKS[-1])
        count, size = -(-columns // block), block * bits // 8
        padded = torch.nn.functional.pad(weight[:, 0], (0, count * size - weight.shape[2]))
        weight = padded.view(-1, count, size)
        scale, zero = scale.expand(-1, count), None if zero is None else zero.expand(-1, count)
    zeros = None if zero is None else _in_bytes(zero, bits)
    rows = x if x.ndim > 1 else F.reshape(x, [1, columns])
    result = F.matmul_nbits(
        rows,
        F.constant(weight),
        F.constant(scale.float()),
        None if zeros is None else F.constant(zeros),
        bias,
        rows=weight.shape[0],
        columns=columns,
        bits=bits,
        block=block,
    )
    return result if x.ndim > 1 else F.reshape(result, [weight.shape[0]])


@converter(INTEGER_LINEAR)
def integer_linear(ctx: Context, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
    """In integers, where the engine can; else the rounded activations are multiplied as float32."""
    x, weight, scale, low, high, _ = args  # engines leave NaN to PyTorch
    _constants_only(weight, scale)
    x = F.cast(ctx.tensor(x), ir.DataType.FLOAT)
    scale = torch.ones(1) if scale is None else scale
    in_integers = getattr(ctx.engine, "multiplies_integers", False)
    if in_integers or ctx.engine is None or ctx.engine.arithmetic == "int8":
        one, zero = F.constant(1.0, ir.DataType.FLOAT), F.constant(-low, torch.uint8)
        x = x if high - low == 255 else F.clip(x, float(low), float(high))
        integers = F.quantize_linear(x, one, zero)
        if in_integers:
            return F.matmul_integer_to_float(integers, F.constant(weight.t()), F.constant(scale), zero)
        dense = F.dequantize_linear(F.constant(weight), F.constant(scale.expand(len(weight))), axis=0)
        return F.matmul(F.dequantize_linear(integers, one, zero), F.transpose(dense, (1, 0)))
    ctx.notes.append(
        f"{ctx.engine.name} multiplies activations of 8 bits as float32: it has no exact product of integers"
    )
    unsigned = (weight.int() + 128).to(torch.uint8)[:, None]
    columns = scale.expand(len(weight))[:, None]
    rounded = F.clip(F.round(x), float(low), float(high))
    return _product(rounded, unsigned, columns, None, None, 8)


@converter(EMBEDDING)
def quantized_embedding(ctx: Context, target: Any, args: Any, kwargs: Any, name: str) -> Tensor:
    """Rows are looked up in their packed form, and only these rows are unpacked."""
    indices, weight, scale, zero, bits, _ = args
    _constants_only(weight, scale, zero)
    places = from_the_front(ctx.tensor(indices), weight.shape[0])
    integers, scales = (F.gather(F.constant(table), places) for table in (weight, scale))
    middle = F.constant(float(2 ** (bits - 1)), ir.DataType.FLOAT)
    if zero is not None:
        middle = F.unsqueeze(F.cast(F.gather(F.constant(zero), places), ir.DataType.FLOAT), [-1])
    if bits == 4:
        low = F.op("BitwiseAnd", integers, F.constant(15, torch.uint8))
        high = F.op("BitShift", integers, F.constant(4, torch.uint8), direction="RIGHT")
        integers = F.concat([F.unsqueeze(half, [-1]) for half in (low, high)], -1)
    blocks, block = scale.shape[1], weight.shape[2] * 8 // bits
    lead = [0] * places.ndim
    grouped = F.reshape(integers, [*lead, blocks, block], keep_zeros=True)
    numbers = F.sub(F.cast(grouped, ir.DataType.FLOAT), middle)
    numbers = F.mul(numbers, F.unsqueeze(F.cast(scales, ir.DataType.FLOAT), [-1]))
    return F.cast(F.reshape(numbers, [*lead, blocks * block], keep_zeros=True), ctx.dtype)


def _constants_only(*tables: Any) -> None:
    if not all(table is None or isinstance(table, torch.Tensor) for table in tables):
        raise ConversionError("a low-bit weight that is not a constant is not handled")


def _in_bytes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of 4 bits two to a byte, in rows of whole bytes."""
    if bits == 8:
        return numbers
    even = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4
