"""Single layers in float16, which ends at 65504: what weights add up to, what becomes of a number."""

from __future__ import annotations

import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals.interval import torch_constant
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network.ops import MOVES_DATA, MULTIPLIES_WEIGHTS

LARGEST_HALF = 65504.0
_TINY = 2.0**-14  # of less, digits are lost
_NEAR = 4  # layers behind a product
_BOUNDS = frozenset({"Clip", "Max", "Min"})


def is_computed(tensor: Tensor) -> bool:
    """Whether a tensor holds floats that are not known beforehand."""
    return tensor.dtype in dtypes.FLOATS and tensor.constant is None


def may_divide_by_zero(layer: Layer) -> bool:
    """Whether a small number that float16 makes zero of would make an infinity of the result."""
    if layer.kind in ("Log", "Reciprocal"):
        return True
    if layer.kind not in ("Div", "Pow"):
        return False
    other = layer.get_inputs(1)[0]
    values = None if other is None else torch_constant(other)
    if values is None:
        return True
    return bool((values.abs() < _TINY).any() if layer.kind == "Div" else (values < 0).any())


def may_transform(layer: Layer) -> bool:
    """Whether a convolution may be computed by Winograd's transform, whose sums are far larger."""
    weight = layer.get_inputs(1)[0]
    if layer.kind != "Conv" or weight is None or layer.attribute("group", 1) != 1:
        return False
    steps = [*layer.attribute("strides", ()), *layer.attribute("dilations", ())]
    return any(size != 1 for size in weight.shape[2:]) and all(step == 1 for step in steps)


def is_scaled(layer: Layer) -> bool:
    """Whether a constant multiplies the result of a product: an engine may multiply the weights by it."""
    made = layer.get_outputs(0)[0]
    for _ in range(_NEAR):
        readers = made.get_users()
        if any(map(_scales, readers)):
            return True
        on = [reader for reader in readers if reader.kind in MOVES_DATA or reader.kind in ("Add", "Sub")]
        if len(on) != 1:
            return False
        made = on[0].get_outputs(0)[0]
    return True


def _scales(layer: Layer) -> bool:
    if layer.kind not in ("Div", "Mul"):
        return layer.kind == "BatchNormalization"
    return any(tensor is not None and tensor.constant is not None for tensor in layer.get_inputs())


def has_large_bound(layer: Layer) -> bool:
    """Whether a layer keeps numbers below a bound that float16 does not hold."""
    if layer.kind not in _BOUNDS:
        return False
    given = [tensor.constant for tensor in layer.get_inputs() if tensor is not None]
    return any(bound is not None and bool((abs(bound) > LARGEST_HALF).any()) for bound in given)


def sums_of_weights(layer: Layer, positive: bool) -> tuple[float, float] | None:
    """The most that weights can add up to in one number of a product, of `positive` numbers, and its bias.

    None where it is no product by constant weights.
    """
    if layer.kind not in MULTIPLIES_WEIGHTS:
        return None
    x, weight, *rest = layer.get_inputs()
    values = None if weight is None else torch_constant(weight)
    biases = [torch_constant(tensor) for tensor in rest if tensor is not None]
    if x is None or values is None or not is_computed(x) or any(bias is None for bias in biases):
        return None
    if layer.kind in ("Conv", "ConvTranspose"):
        over = [0, *range(2, values.ndim)] if layer.kind == "ConvTranspose" else list(range(1, values.ndim))
    else:
        over = [values.ndim - 1 if layer.attribute("transB", 0) or values.ndim == 1 else values.ndim - 2]
    sums = [values.clamp(min=0).sum(over), values.clamp(max=0).sum(over).neg()]
    most = torch.maximum(*sums) if positive else sums[0] + sums[1]
    ends = [float(bias.abs().max()) for bias in biases if bias is not None and bias.numel()]
    return (
        float(most.max()) * abs(layer.attribute("alpha", 1.0)) if most.numel() else 0.0,
        max(ends, default=0.0) * abs(layer.attribute("beta", 1.0)),
    )


def mask_values(layers: list[Layer], net: Network) -> set[ir.Value]:
    """The values of which a softmax alone sees anything: minus infinity is what masks are made of."""
    found: set[ir.Value] = set()
    outputs = {tensor.value for tensor in net.get_outputs()}
    uses: dict[ir.Value, list[tuple[Layer, int]]] = {}
    for layer in layers:
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is not None:
                uses.setdefault(tensor.value, []).append((layer, index))

    def is_masked(layer: Layer, index: int) -> bool:
        if layer.kind == "Softmax" or (layer.kind == "Attention" and index == 3):
            return True
        passes = layer.kind in MOVES_DATA or layer.kind in (
            "Add",
            "Equal",
        )  # to which infinity another is put
        return passes and all(made.value in found for made in layer.get_outputs())

    for layer in reversed(layers):
        for tensor in layer.get_outputs():
            read = uses.get(tensor.value, [])
            if read and tensor.value not in outputs and all(is_masked(*use) for use in read):
                found.add(tensor.value)
    return found
