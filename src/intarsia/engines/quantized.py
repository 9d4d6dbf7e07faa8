"""Networks of models that were already quantized, written so that engines use integer kernels.

torch multiplies by a reciprocal where `QuantizeLinear` divides, so the exact conversion is a product, a
rounding, a sum and a clip, which no engine fuses. Ranges narrower than the type stay as they are.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F

_RANGES = {ir.DataType.INT8: (-128.0, 127.0), ir.DataType.UINT8: (0.0, 255.0)}


def is_quantized(net: Network) -> bool:
    """Whether any layer reads quantised values."""
    return any(layer.kind == "DequantizeLinear" for layer in net.get_layers())


def with_quantize_layers(net: Network) -> Network:
    """A copy in which rounding, spelled out to be exactly torch's, is a `QuantizeLinear` that engines fuse.

    That divides where torch multiplies by the reciprocal: an integer here and there differs by one.
    """
    copy = Network.of(net.graph.clone())
    for layer in list(copy.get_layers()):
        match = _rounding(layer)
        if match is None:
            continue
        x, scale, zero_point = match
        (old,) = layer.get_outputs()
        with net_guard(copy), copy.before(layer):
            step = _own_scale(old, scale) or F.constant(scale, x.dtype)
            new = F.quantize_linear(x, step, F.constant(zero_point, old.dtype))
        copy.replace_all_uses(old, new)
        _remove_unread(copy, layer)
    return copy


def _rounding(cast: Layer) -> tuple[Tensor, float, int] | None:
    """What is rounded, its scale and zero point, if a layer ends `clip(round(x / scale) + zero_point)`."""
    limits = _RANGES.get(cast.get_outputs()[0].dtype)
    clip = _maker(cast.get_inputs(0)[0], "Clip") if cast.kind == "Cast" and limits else None
    if clip is None or tuple(map(_number, clip.get_inputs(1, 2))) != limits:
        return None
    total, zero_point = clip.get_inputs(0)[0], 0.0
    if (added := _with_number(total, "Add")) is not None:
        total, zero_point = added
    steps = _maker(total, "Round")
    product = None if steps is None else _with_number(steps.get_inputs(0)[0], "Mul")
    if product is None or product[0].dtype != ir.DataType.FLOAT:
        return None
    x, inverse = product
    if not 0.0 < inverse < math.inf or not limits[0] <= zero_point <= limits[1]:
        return None
    return x, 1.0 / inverse, int(zero_point)


def _with_number(result: Tensor | None, kind: str) -> tuple[Tensor, float] | None:
    """What a layer of this kind reads besides a number, and the number."""
    layer = _maker(result, kind)
    if layer is None:
        return None
    first, second = layer.get_inputs()
    for tensor, other in ((first, second), (second, first)):
        number = _number(other)
        if tensor is not None and number is not None:
            return tensor, number
    return None


def _maker(tensor: Tensor | None, kind: str) -> Layer | None:
    layer = None if tensor is None else tensor.get_parent()
    return layer if layer is not None and layer.kind == kind else None


def _number(tensor: Tensor | None) -> float | None:
    content = None if tensor is None else tensor.constant
    return float(content.item()) if content is not None and np.size(content) == 1 else None


def _own_scale(integers: Tensor, scale: float) -> Tensor | None:
    """The scale by which they are read, if it is theirs: engines drop what one scale writes and reads."""
    for user in integers.get_users():
        read_by = user.get_inputs(1)[0] if user.kind == "DequantizeLinear" else None
        number = _number(read_by)
        if number is not None and math.isclose(number, scale, rel_tol=1e-6):
            return read_by
    return None


def _remove_unread(net: Network, last: Layer) -> None:
    """Take out a chain of layers from its end, as far as nothing else reads it."""
    waiting: list[Layer | None] = [last]
    while waiting:
        layer = waiting.pop()
        if layer is None or any(out.get_users() or out.is_output() for out in layer.get_outputs()):
            continue
        makers = [tensor.get_parent() for tensor in layer.get_inputs() if tensor is not None]
        net.remove(layer)
        waiting += makers
