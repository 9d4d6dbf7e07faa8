"""Functionals of quantisation: integers that stand for multiples of a scale."""

from __future__ import annotations

from intarsia.network.functional.core import op
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature

__all__ = ["dequantize_linear", "quantize_linear"]


@record_signature
def quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int | None = None) -> Tensor:
    """`round(x / scale) + zero_point`, kept within the range of the zero point's type."""
    return op("QuantizeLinear", x, scale, zero_point, axis=axis)


@record_signature
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int | None = None
) -> Tensor:
    """`(x - zero_point) * scale`."""
    return op("DequantizeLinear", x, scale, zero_point, axis=axis)
