"""Constants that engines multiply ahead of time, or divide by through a reciprocal that overflows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals import Interval
from intarsia.engines.guards.intervals.interval import torch_constant
from intarsia.network import Layer, Tensor, dtypes
from intarsia.network.ops import KEEPS_VALUES, MULTIPLIES_WEIGHTS

# Divisors so small that their reciprocal overflows, for engines that multiply by it.
#
# OpenVINO multiplies by the reciprocal, which overflows below 2**-128: 0 by such a number was NaN. A guard
# would reduce every divisor in every call; a factor of 2**64 on both operands is fused with the division.


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


# Constant factors that engines multiply with each other, or into weights, ahead of time.
#
# `x * 1e20 * 1e20` is one product by infinity then, which makes NaN of 0 where PyTorch makes 0.
#
# Both engines multiply constant factors with each other and into weights, and no option forbids that alone. A
# network where the merged constant would overflow or vanish is cut between the two.


_SUMS = frozenset({"Add", "Sub"})
_LIMITS = torch.finfo(torch.float32)


@dataclass(frozen=True)
class _Chain:
    """What a tensor was multiplied by: factors, a weight in front of them, and factors in front of that."""

    before: float = 1.0
    weight: Tensor | None = None
    after: float = 1.0

    def size(self) -> float:
        """The largest magnitude of all of it as one constant; 1 where a weight of zeros takes it in."""
        weight = 1.0 if self.weight is None else _finite(_largest(self.weight))
        return 1.0 if weight is None else self.before * self.after * weight


def merged_out_of_range(layers: Iterable[Layer]) -> str | None:
    """The first layer whose constant factor, merged with those before it, leaves float32, in words."""
    chains: dict[ir.Value, _Chain] = {}
    for layer in layers:
        inputs = layer.get_inputs()
        live = [tensor for tensor in inputs if tensor is not None and tensor.constant is None]
        if len(live) != 1 or live[0].dtype not in dtypes.FLOATS:
            continue
        chain = chains.get(live[0].value, _Chain())
        if layer.kind in MULTIPLIES_WEIGHTS:
            weight = next((t for t in inputs[:2] if t is not None and t is not live[0]), None)
            following = _Chain(chain.after, weight)
            changed = chain.after != 1.0
        elif (factor := _factor(layer, inputs, live[0])) is not None:
            following = _Chain(chain.before, chain.weight, chain.after * factor)
            changed = True
        elif layer.kind in KEEPS_VALUES | _SUMS:
            following, changed = chain, False
        else:
            continue
        if changed and chain != _Chain() and not _LIMITS.tiny <= following.size() <= _LIMITS.max:
            merged = f"makes a factor of up to {following.size():g}, which float32 does not hold"
            return f"{layer.kind} {layer.name} by a constant, merged with those before it, {merged}"
        chains[layer.get_outputs(0)[0].value] = following
    return None


def _factor(layer: Layer, inputs: Sequence[Tensor | None], live: Tensor) -> float | None:
    """The largest magnitude that a layer multiplies its input by; None where it does something else."""
    if layer.kind == "BatchNormalization" and inputs[0] is live:
        scale, variance = torch_constant(inputs[1]), torch_constant(inputs[4])  # type: ignore[arg-type]
        assert scale is not None and variance is not None
        root = (variance.double() + float(layer.attribute("epsilon", 1e-5))).sqrt()
        return _finite(float((scale.double() / root).abs().amax()))
    other = next((t for t in inputs if t is not None and t is not live), None)
    if other is None or layer.kind not in ("Div", "Mul") or (layer.kind == "Div" and inputs[0] is not live):
        return None
    if layer.kind == "Mul":
        return _finite(_largest(other))
    values = torch_constant(other)
    assert values is not None
    return _finite(float((1 / values.double()).abs().amax())) if values.numel() else None


def _largest(tensor: Tensor) -> float:
    values = torch_constant(tensor)
    assert values is not None
    return float(values.abs().amax()) if values.numel() else 0.0


def _finite(size: float) -> float | None:
    """Zeros and infinities, which stay what they are in whichever order, end a chain."""
    return size if 0.0 < size < math.inf else None
