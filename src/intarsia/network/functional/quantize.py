"""Functionals of quantization: integers that stand for multiples of a scale."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.network.functional.core import constant, op
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature
from intarsia.network.value import MICROSOFT

__all__ = ["dequantize_linear", "matmul_integer_to_float", "matmul_nbits", "quantize_linear"]

_IN_FLOAT32 = 1  # the accuracy level at which activations are not rounded


@record_signature
def quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int | None = None) -> Tensor:
    """`round(x / scale) + zero_point`, clamped to the range of the zero point's dtype."""
    return op("QuantizeLinear", x, scale, zero_point, axis=axis)


@record_signature
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int | None = None
) -> Tensor:
    """`(x - zero_point) * scale`."""
    return op("DequantizeLinear", x, scale, zero_point, axis=axis)


@record_signature
def matmul_nbits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int,
    columns: int,
    bits: int,
    block: int,
) -> Tensor:
    """`x @ w.T + bias`; the weight is bytes of shape (rows, blocks of columns, bytes of a block)."""
    return op(
        "MatMulNBits",
        x,
        weight,
        scale,
        zero_point,
        None,
        bias,
        domain=MICROSOFT,
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=_IN_FLOAT32,
    )


@record_signature
def matmul_integer_to_float(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`(x - zero_point) @ weight * scale` of uint8 by int8 (columns, rows), summed up in integers."""
    one = constant(1.0, ir.DataType.FLOAT)  # the scale of all activations
    return op("MatMulIntegerToFloat", x, weight, one, scale, zero_point, domain=MICROSOFT)
