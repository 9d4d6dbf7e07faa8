"""Shape rules of quantised tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.infer.registry import Made, first, infers, optional, second
from intarsia.network.value import TypedValue


@infers("QuantizeLinear")
def _quantize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    zero_point, wanted = optional(inputs, 2), ir.DataType(int(attributes.get("output_dtype", 0)))
    if wanted == ir.DataType.UNDEFINED:
        wanted = ir.DataType.UINT8 if zero_point is None else zero_point.dtype
    return [(wanted, first(inputs).shape)]


@infers("DequantizeLinear")
def _dequantize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    wanted = ir.DataType(int(attributes.get("output_dtype", 0)))
    return [(second(inputs).dtype if wanted == ir.DataType.UNDEFINED else wanted, first(inputs).shape)]
