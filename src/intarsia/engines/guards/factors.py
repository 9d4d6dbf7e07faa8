"""Constant factors that engines multiply with each other, or into weights, ahead of time.

`x * 1e20 * 1e20` is one product by infinity then, which makes NaN of 0 where PyTorch makes 0.

Both engines multiply constant factors with each other and into weights, and no option forbids that alone. A
network where the merged constant would overflow or vanish is cut between the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals.rules import torch_constant
from intarsia.network import Layer, Tensor, dtypes
from intarsia.network.ops import KEEPS_VALUES, MULTIPLIES_WEIGHTS

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
