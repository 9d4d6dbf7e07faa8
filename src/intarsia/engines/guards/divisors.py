"""Divisors so small that their reciprocal overflows, for engines that multiply by it.

OpenVINO multiplies by the reciprocal, which overflows below 2**-128: 0 by such a number was NaN. A guard
would reduce every divisor in every call; a factor of 2**64 on both operands is fused with the division.
"""

from __future__ import annotations

import onnx_ir as ir

from intarsia.engines.guards.intervals import Interval
from intarsia.network import Layer, Tensor
from intarsia.network.ops import KEEPS_VALUES

_SMALLEST_NORMAL = 2.0**-126
# The root of the smallest denormal is normal.
_ROOTS = frozenset({"ReduceL2", "Sqrt"})
_HAS_DENORMALS = frozenset({ir.DataType.FLOAT, ir.DataType.BFLOAT16})  # as float32, float16's are normal


def divides_by_floats(layer: Layer) -> bool:
    """Whether a layer divides by numbers that may be denormal in float32."""
    return layer.kind == "Div" and layer.get_outputs(0)[0].dtype in _HAS_DENORMALS


def may_be_denormal(divisor: Tensor, found: Interval) -> bool:
    """Whether elements may be denormal, as far as a constant, the interval or the source can tell."""
    if divisor.constant is not None:
        sizes = abs(divisor.constant)
        return bool(((sizes > 0) & (sizes < _SMALLEST_NORMAL)).any())
    return found.has_zero and not _is_a_root_or_cast(divisor)


def _is_a_root_or_cast(tensor: Tensor) -> bool:
    parent = tensor.get_parent()
    while parent is not None and parent.kind in KEEPS_VALUES:
        source = parent.get_inputs(0)[0]
        parent = None if source is None else source.get_parent()
    if parent is None or parent.kind != "Cast":
        return parent is not None and parent.kind in _ROOTS
    given = parent.get_inputs(0)[0]
    return given is not None and given.dtype not in _HAS_DENORMALS | {ir.DataType.DOUBLE}
