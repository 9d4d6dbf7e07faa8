"""Constants that engines multiply ahead of time, or divide by through a reciprocal that overflows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals import Interval, torch_constant
from intarsia.network import Layer, Tensor, dtypes
from intarsia.network.ops import KEEPS_VALUES, MULTIPLIES_WEIGHTS

_SMALLEST_NORMAL = 2.0**-126
_HAS_DENORMALS = frozenset({ir.DataType.FLOAT, ir.DataType.BFLOAT16})  # as float32, float16's are normal
_LIMITS = torch.finfo(torch.float32)


def divides_by_floats(layer: Layer) -> bool:
    """Whether a layer divides by numbers that may be denormal in float32.

    OpenVINO multiplies by the reciprocal, which overflows below 2**-128: 0 by such a number was NaN.
    """
    return layer.kind == "Div" and layer.get_outputs(0)[0].dtype in _HAS_DENORMALS


def may_be_denormal(divisor: Tensor, interval: Interval) -> bool:
    """Whether elements may be denormal, as far as a constant or the interval can tell."""
    if divisor.constant is not None:
        sizes = abs(divisor.constant)
        return bool(((sizes > 0) & (sizes < _SMALLEST_NORMAL)).any())
    return interval.has_zero


def merged_out_of_range(layers: Iterable[Layer]) -> str | None:
    """The first layer whose constant factor, merged with those before it, leaves float32, in words.

    Engines multiply constant factors with each other and into weights, and no option forbids that alone:
    `x * 1e20 * 1e20` is one product by infinity then, which makes NaN of 0 where PyTorch makes 0. A network
    where the merged constant would overflow or vanish is cut between the two.
    """
    chains: dict[ir.Value, tuple[float, float]] = {}  # the weight that made a tensor, and factors behind it
    for layer in layers:
        inputs = layer.get_inputs()
        live = [tensor for tensor in inputs if tensor is not None and tensor.constant is None]
        if len(live) != 1 or live[0].dtype not in dtypes.FLOATS:
            continue
        weight, after = chains.get(live[0].value, (1.0, 1.0))
        factor = _factor(layer, inputs, live[0])
        if factor is None:
            if layer.kind in KEEPS_VALUES | {"Add", "Sub"}:
                chains[layer.get_outputs(0)[0].value] = weight, after
            continue
        # Zeros and infinities stay what they are in whichever order.
        factor = factor if 0.0 < factor < math.inf else 1.0
        is_product = layer.kind in MULTIPLIES_WEIGHTS  # weights are not multiplied with each other
        merged = after * factor * (1.0 if is_product else weight)
        if merged != factor and not _LIMITS.tiny <= merged <= _LIMITS.max:
            reason = f"makes a factor of up to {merged:g}, which float32 does not hold"
            return f"{layer.kind} {layer.name} by a constant, merged with those before it, {reason}"
        chains[layer.get_outputs(0)[0].value] = (factor, 1.0) if is_product else (weight, after * factor)
    return None


def _factor(layer: Layer, inputs: Sequence[Tensor | None], live: Tensor) -> float | None:
    """The largest magnitude that a layer multiplies its input by; None where it does something else."""
    constants = [torch_constant(tensor) for tensor in inputs if tensor is not None and tensor is not live]
    if layer.kind == "BatchNormalization" and inputs[0] is live:
        scale, _, _, variance = (value.double() for value in constants if value is not None)
        factors = scale / (variance + float(layer.attribute("epsilon", 1e-5))).sqrt()
    elif layer.kind == "Div" and inputs[0] is live and constants[0] is not None:
        factors = 1 / constants[0].double()
    elif layer.kind in MULTIPLIES_WEIGHTS | {"Mul"} and constants and constants[0] is not None:
        factors = constants[0]
    else:
        return None
    return float(factors.abs().amax()) if factors.numel() else None
