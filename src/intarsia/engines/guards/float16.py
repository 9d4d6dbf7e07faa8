"""The checks of a network's numbers that let float16, whose maximum is 65504, replace a longer type.

All operands must be finite: a tensor that may not be finite is checked where a layer reads it. Of a product
by weights the operand is, by the most that its sums may be, so that its kernel can go on with the next layer.
So no infinity is hidden by what follows (relu of minus infinity is 0, and so is a number divided by it). A
first version trusted layers to show infinities: on ARM (OpenVINO 2026.4) a ReLU behind a sum makes 0 of NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir
import torch

from intarsia.engines.guards.interval_rules import layer_ranges
from intarsia.engines.guards.intervals import (
    ANYTHING,
    INF,
    Interval,
    range_of,
    read_by_softmax_alone,
    torch_constant,
    whole,
)
from intarsia.engines.guards.kinds import Guards, ValueGuard
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network.ops import COMPARES, MOVES_DATA, MULTIPLIES_WEIGHTS, NORMALIZES, RECURRENT

LARGEST_HALF = 65504.0
_SAFE = Interval(-60000.0, 60000.0)  # below it no rounding makes an infinity
_PRODUCT = 29000.0  # of a sum of products: two can be added, as before the first relu of a stage of ResNet
_TINY = 2.0**-14  # of less, digits are lost
_SMALL = 1 << 15  # elements
_CALM = 2.0**36  # the sum of a million numbers, each the largest
_LOGARITHM = 100.0  # far beyond that of any number


def in_float16(net: Network, guards: Guards) -> Guards:
    """The guards of a network that is computed in float16; no sums of magnitudes are needed any more."""
    inputs = {tensor.name for tensor in net.get_inputs()}
    others = [g for g in guards.others if not (isinstance(g, ValueGuard) and g.total) or g.tensor in inputs]
    return replace(guards, others=[*others, *overflow_guards(net)])


def overflow_guards(net: Network) -> list[ValueGuard]:
    """Guards of a network whose longer floats are computed in float16.

    Refuses constants that float16 does not hold, unless they are masks: EngineError.
    """
    return _Watch(net).run()


class _Watch:
    """One pass in order: a value that a layer must not read gets a guard, and is excluded from there on."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.layers = list(net.get_layers())
        self.known = {tensor.value: whole(tensor.dtype) for tensor in net.get_inputs()}
        self.inputs = set(self.known)
        self.scores = read_by_softmax_alone(self.layers, net)
        self.masks: set[ir.Value] = set()  # these may hold minus infinity
        self.sums = {layer: _sums_of_weights(layer) for layer in self.layers}
        self.guards: dict[tuple[ir.Value, float], ValueGuard] = {}

    def run(self) -> list[ValueGuard]:
        for layer in self.layers:
            outputs = layer.get_outputs()
            is_mask = all(tensor.value in self.scores for tensor in outputs)
            is_infinite = _has_large_constant(layer, is_mask)
            if is_mask and (is_infinite or self._reads_mask(layer)):
                self.masks.update(tensor.value for tensor in outputs)
            self._watch_operands(layer)
            for tensor, interval in zip(outputs, self._ranges(layer), strict=False):
                self.known[tensor.value] = interval
                if layer.kind == "Log":
                    self._require(tensor, _LOGARITHM)  # of zero OpenVINO has the least number
                elif _shows(layer):
                    self._require(tensor, LARGEST_HALF)
        for tensor in self.net.get_outputs():
            self._require(tensor, LARGEST_HALF)
        return list(self.guards.values())

    def _reads_mask(self, layer: Layer) -> bool:
        return any(tensor is not None and tensor.value in self.masks for tensor in layer.get_inputs())

    def _watch_operands(self, layer: Layer) -> None:
        moves = layer.kind in MOVES_DATA and not any(t.value in self.masks for t in layer.get_outputs())
        for index, tensor in enumerate([] if moves else layer.get_inputs()):
            if tensor is None or not _is_computed(tensor) or (index == 0 and _shows(layer)):
                continue
            if tensor.value in self.scores and tensor.value in self.inputs:
                self.masks.add(tensor.value)
                self.guards[tensor.value, -INF] = ValueGuard(tensor.name, -INF, LARGEST_HALF)
            elif tensor.value not in self.masks:
                self._require(tensor, self._most(layer, index))

    def _most(self, layer: Layer, index: int) -> float:
        """How large an operand may be: finite, and if weights multiply it, the sum of the products too."""
        sums = self.sums[layer] if index == 0 else None
        if sums is None:
            return LARGEST_HALF
        total, bias = sums
        return min(LARGEST_HALF, max(_PRODUCT - bias, 0.0) / max(total * 1.02, 1e-6))

    def _require(self, tensor: Tensor, most: float) -> None:
        """Keep a tensor within a limit from here on, by a guard if that is not known."""
        if not _is_computed(tensor) or 0 in tensor.shape:
            return
        interval, sure = range_of(tensor, self.known), Interval(max(-most, _SAFE.low), min(most, _SAFE.high))
        if interval.within(sure):
            return
        # One sum shows infinities and NaN; a limit needs a check of each element.
        needs_finite = most == LARGEST_HALF or interval.reach <= sure.high
        self.guards[tensor.value, most] = (
            ValueGuard(tensor.name, -_CALM, _CALM, total=True)
            if needs_finite and tensor.value not in self.inputs
            else ValueGuard(tensor.name, -most, most)
        )
        self.known[tensor.value] = interval.cut(sure)

    def _ranges(self, layer: Layer) -> list[Interval]:
        operands = [None if tensor is None else range_of(tensor, self.known) for tensor in layer.get_inputs()]
        sums = self.sums[layer]
        if sums is not None:
            x = operands[0]
            assert x is not None
            reach = 1.01 * (x.reach * sums[0] + sums[1])
            return [Interval(-reach, reach, x.nan)]
        if _divides_by_zero(layer):
            return [ANYTHING] * len(layer.get_outputs())
        ranges = layer_ranges(layer, operands)
        if layer.kind == "Attention":
            sizes = [x.shape[-1] for x in layer.get_inputs(0, 1) if x is not None]
            width = max((size for size in sizes if isinstance(size, int)), default=INF)
            overflows = not math.prod(x.reach for x in operands[:2] if x is not None) * width < _SAFE.high
        else:  # NaN may arise inside: of a variance, the difference of two large numbers, that is less than 0
            overflows = layer.kind in NORMALIZES | RECURRENT
        return [replace(interval, nan=interval.nan or overflows) for interval in ranges]


def _has_large_constant(layer: Layer, is_mask: bool) -> bool:
    """Whether a layer reads a constant that float16 cannot hold; refused unless it is a mask."""
    if layer.kind in COMPARES or _has_large_bound(layer):
        return False  # what they are given is finite
    constants = [t for t in layer.get_inputs() if t is not None and t.dtype in dtypes.FLOATS]
    values = [number for t in constants if (number := torch_constant(t)) is not None]
    if layer.kind == "ConstantOfShape" and layer.get_outputs(0)[0].dtype in dtypes.FLOATS:
        values.append(torch.tensor(layer_ranges(layer, [None])[0].low))
    large = [number[~(number.abs() <= LARGEST_HALF)] for number in values]
    ends = [end.item() for number in large if number.numel() for end in torch.aminmax(number)]
    if ends and not (is_mask and max(ends) < 0):
        raise EngineError(f"a constant of {layer.kind} holds {max(ends):g}, which float16 cannot hold")
    return bool(ends)


def _is_computed(tensor: Tensor) -> bool:
    """Whether a tensor holds floats that are not known beforehand."""
    return tensor.dtype in dtypes.FLOATS and tensor.constant is None


def _shows(layer: Layer) -> bool:
    """Whether the result of a product is watched, and not its operand: an overflow in it is seen there.

    This is the case for small products, and for convolutions that Winograd's transform may compute, whose
    sums are larger.
    """
    if layer.kind not in MULTIPLIES_WEIGHTS:
        return False
    sizes = [size if isinstance(size, int) else _SMALL + 1 for size in layer.get_outputs(0)[0].shape]
    weight = layer.get_inputs(1)[0]
    if math.prod(sizes) <= _SMALL or layer.kind != "Conv" or weight is None:
        return math.prod(sizes) <= _SMALL
    steps = [layer.attribute("group", 1), *layer.attribute("strides", ()), *layer.attribute("dilations", ())]
    return any(size != 1 for size in weight.shape[2:]) and all(step == 1 for step in steps)


def _divides_by_zero(layer: Layer) -> bool:
    """Whether a small number that becomes 0 in float16 would make the result infinite."""
    if layer.kind in ("Log", "Reciprocal"):
        return True
    if layer.kind not in ("Div", "Pow"):
        return False
    other = layer.get_inputs(1)[0]
    values = None if other is None else torch_constant(other)
    if values is None:
        return True
    return bool((values.abs() < _TINY).any() if layer.kind == "Div" else (values < 0).any())


def _has_large_bound(layer: Layer) -> bool:
    """Whether a layer keeps numbers below a bound that float16 does not hold."""
    bounds = [tensor.constant for tensor in layer.get_inputs() if tensor is not None]
    is_bound = layer.kind in ("Clip", "Max", "Min")
    return is_bound and any(bound is not None and bool((abs(bound) > LARGEST_HALF).any()) for bound in bounds)


def _sums_of_weights(layer: Layer) -> tuple[float, float] | None:
    """The most that weights can add up to in one number of a product, and its bias.

    None if it is not a product with constant weights.
    """
    if layer.kind not in MULTIPLIES_WEIGHTS:
        return None
    x, weight, *rest = layer.get_inputs()
    values = None if weight is None else torch_constant(weight)
    biases = [torch_constant(tensor) for tensor in rest if tensor is not None]
    if x is None or values is None or not _is_computed(x) or any(bias is None for bias in biases):
        return None
    if layer.kind in ("Conv", "ConvTranspose"):
        over = [0, *range(2, values.ndim)] if layer.kind == "ConvTranspose" else list(range(1, values.ndim))
    else:
        over = [values.ndim - 1 if layer.attribute("transB", 0) or values.ndim == 1 else values.ndim - 2]
    sums = values.abs().sum(over)
    ends = [float(bias.abs().max()) for bias in biases if bias is not None and bias.numel()]
    return (
        float(sums.max()) * abs(layer.attribute("alpha", 1.0)) if sums.numel() else 0.0,
        max(ends, default=0.0) * abs(layer.attribute("beta", 1.0)),
    )
