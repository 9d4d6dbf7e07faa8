"""Functionals of quantisation: integers that stand for multiples of a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import NetworkError
from intarsia.network.functional.core import op
from intarsia.network.infer.registry import Made, first, infers
from intarsia.network.network import Tensor
from intarsia.network.signature import record_signature
from intarsia.network.value import TypedValue

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


@infers("QuantizeLinear")
def _quantize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    zero_point = inputs[2] if len(inputs) > 2 else None
    if zero_point is None:
        raise NetworkError("QuantizeLinear needs a zero point, whose type is that of the result")
    return [(zero_point.dtype, first(inputs).shape)]


@infers("DequantizeLinear")
def _dequantize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    scale = inputs[1]
    if scale is None:
        raise NetworkError("DequantizeLinear needs a scale, whose type is that of the result")
    return [(scale.dtype, first(inputs).shape)]
