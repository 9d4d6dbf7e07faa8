"""What must hold of a network's numbers so that float16 can stand for a longer type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from intarsia.engines.guards.half_layers import (
    LARGEST_HALF,
    has_large_bound,
    is_computed,
    is_scaled,
    mask_values,
    may_divide_by_zero,
    may_transform,
    sums_of_weights,
)
from intarsia.engines.guards.intervals import Interval, layer_ranges, range_of, whole
from intarsia.engines.guards.intervals.interval import torch_constant
from intarsia.engines.guards.kinds import AnyGuard, Guards, Largest, ValueGuard
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network.ops import MOVES_DATA, MULTIPLIES_WEIGHTS, NORMALIZES, RECURRENT

_SURE = 60000.0  # below it no rounding makes an infinity
_SMALL = 1 << 15  # elements
_CALM = 2.0**36  # the sum of a million numbers, each the largest
_SAFE = Interval(-_SURE, _SURE)
_LOGARITHM = 100.0  # far beyond that of any number
# fmt: off
# Of an infinity that stands for a large number they make what they make of the number, or show it.
_SATURATING = frozenset(
    {
        "Attention", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu",
        "LogSoftmax", "Max", "MaxPool", "Min", "Mish", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus",
        "Swish", "Tanh",
    }
)
# Their infinities may stand for any number: of a sum on the way, of zero that a small number was rounded to.
_DOUBTFUL = _SATURATING | frozenset(
    {
        "AveragePool", "Cast", "CumSum", "Div", "GlobalAveragePool", "Log", "MatMul", "Mod", "Pow",
        "Reciprocal", "ReduceMean", "ReduceProd", "ReduceSum",
    }
)
# fmt: on
_SHOWING = frozenset({"LeakyRelu", "MaxPool", "Relu"})  # of a positive infinity
_LOSES = frozenset({"Gelu", "HardSwish", "LogSoftmax", "Mish", "Softmax", "Swish"})  # -inf * 0, inf - inf
# NaN may arise inside: of a variance, the difference of two large numbers, that is less than 0.
_INWARD = NORMALIZES | RECURRENT
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


def in_float16(net: Network, guards: Guards) -> Guards:
    """The guards of a network that is computed in float16; no sums of magnitudes are needed any more."""
    inputs = {tensor.name for tensor in net.get_inputs()}
    kept = [g for g in guards.others if not (isinstance(g, ValueGuard) and g.total) or g.tensor in inputs]
    return replace(guards, others=[*kept, *overflow_guards(net)])


def overflow_guards(net: Network) -> list[AnyGuard]:
    """Guards of a network whose longer floats are computed in float16.

    What is computed with is finite, and what is multiplied by weights so small that no sum of products can
    overflow. So no infinity is scaled down, nor subtracted from another, nor compared; it can only arise in
    the last step before a layer that saturates, where it counts as the number it stands for, or is seen
    behind it. Refuses constants that float16 does not hold: EngineError.
    """
    return _Watch(net).run()


class _Watch:
    """One pass in order: what a layer must not be given is watched for, and ruled out from there on."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.layers = list(net.get_layers())
        floats = [tensor for tensor in net.get_inputs() if tensor.dtype in dtypes.FLOATS]
        self.known = {tensor.value: whole(tensor.dtype) for tensor in net.get_inputs()}
        self.masks = mask_values(self.layers, net)
        self.doubtful = {tensor.value for tensor in floats} - self.masks  # they may be NaN
        self.loose: set[ir.Value] = set()  # sums of an infinity and a number: it may stand for a small one
        self.guards: dict[ir.Value, list[AnyGuard]] = {}
        self.inputs = {tensor.value for tensor in net.get_inputs()}
        self.sums: dict[Layer, tuple[float, float] | None] = {}

    def run(self) -> list[AnyGuard]:
        for layer in self.layers:
            self._refuse_constants(layer)
            if layer.kind not in MOVES_DATA:
                self._stand(layer)
            elif all(made.value in self.masks for made in layer.get_outputs()):
                self._stand_unmasked(layer)
            self._note(layer)
        for tensor in self.net.get_outputs():
            self._require(tensor, LARGEST_HALF)
        return [guard for guards in self.guards.values() for guard in guards]

    def _stand(self, layer: Layer) -> None:
        saturates = layer.kind in _SATURATING and not has_large_bound(layer)
        unsure = self.doubtful if layer.kind in _SHOWING else self.doubtful | self.loose
        if layer.kind in ("Add", "Sub") and self._is_of_one(layer):
            return
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is None or not is_computed(tensor):
                continue
            if saturates and tensor.value in unsure:
                self._require(tensor, LARGEST_HALF)
            elif not saturates and not self._shows(layer, index):
                self._require(tensor, self._most(layer, tensor, index))

    def _stand_unmasked(self, layer: Layer) -> None:
        """What a mask is put over must be sure: behind it, an infinity would pass for one of the mask's."""
        for tensor in layer.get_inputs():
            if tensor is not None and tensor.value in self.doubtful:
                self._require(tensor, LARGEST_HALF)

    def _is_of_one(self, layer: Layer) -> bool:
        """Whether but one of two summands may be an infinity, which then is that of the sum.

        The sum may be a small number none the less: it is loose. To what is loose already nothing is added,
        unless only a positive infinity is left of it, which stays one.
        """
        given = [tensor for tensor in layer.get_inputs() if tensor is not None]
        may_be = [tensor for tensor in given if not range_of(tensor, self.known).within(_SAFE)]
        if len(may_be) > 1 or any(tensor.value in self.doubtful for tensor in may_be):
            return False
        loose = [tensor for tensor in may_be if tensor.value in self.loose]
        return not loose or (layer.kind == "Add" and range_of(loose[0], self.known).low >= 0)

    def _shows(self, layer: Layer, index: int) -> bool:
        """Whether the result of a product is watched: an overflow anywhere in it is seen there.

        So it is of small ones, of convolutions whose kernel may transform what it adds up, and where a factor
        may become one of the weights. Of others the operand is, by its limit, so that their kernels can go on
        with the next layer.
        """
        if index != 0 or layer.kind not in MULTIPLIES_WEIGHTS:
            return False
        sizes = [size if isinstance(size, int) else _SMALL for size in layer.get_outputs(0)[0].shape]
        return math.prod(sizes) <= _SMALL or may_transform(layer) or is_scaled(layer)

    def _most(self, layer: Layer, tensor: Tensor, index: int) -> float:
        """How large an operand may be: finite, and if weights multiply it, the sum of the products too."""
        summed = self._weighed(layer, tensor) if index == 0 else None
        if summed is None:
            return LARGEST_HALF
        total, bias = summed
        return min(LARGEST_HALF, max(_SURE - bias, 0.0) / max(total * 1.02, 1e-6))

    def _weighed(self, layer: Layer, x: Tensor | None) -> tuple[float, float] | None:
        positive = x is not None and range_of(x, self.known).low >= 0
        if layer not in self.sums:
            self.sums[layer] = sums_of_weights(layer, positive)
        return self.sums[layer]

    def _require(self, tensor: Tensor, most: float) -> None:
        """Let a tensor stay within a limit from here on, by a guard if it is not known to."""
        if not is_computed(tensor) or 0 in tensor.shape:
            return
        is_mask = tensor.value in self.masks and tensor.value not in self.doubtful
        least = -math.inf if is_mask else -most
        found = range_of(tensor, self.known)
        if not found.within(Interval(least, min(most, _SURE))):
            self._watch(tensor, found, least, most)
            # What is finite counts as sure; where it is too large to add to, the sum is looked at as well.
            sure = Interval(least if is_mask else max(least, -_SURE), min(most, _SURE))
            self.known[tensor.value] = found.cut(sure)
        self.doubtful.discard(tensor.value)
        self.loose.discard(tensor.value)

    def _watch(self, tensor: Tensor, found: Interval, least: float, most: float) -> None:
        name, guards = tensor.name, self.guards.setdefault(tensor.value, [])
        if tensor.value in self.inputs or least == -math.inf:
            guards.append(ValueGuard(name, least, most))
            return
        is_small = found.reach <= min(most, _SURE)
        if most < LARGEST_HALF and not is_small:
            guards.append(Largest(name, most, signed=found.low < 0))
        if most == LARGEST_HALF or is_small or (found.nan and found.low < 0):
            guards.append(ValueGuard(name, -_CALM, _CALM, total=True))

    def _note(self, layer: Layer) -> None:
        given = [None if tensor is None else range_of(tensor, self.known) for tensor in layer.get_inputs()]
        outputs = layer.get_outputs()
        summed = self._weighed(layer, layer.get_inputs(0)[0]) if layer.kind in MULTIPLIES_WEIGHTS else None
        if summed is None:
            made = [self._with_lost(layer, given, interval) for interval in layer_ranges(layer, given)]
        else:
            (total, bias), x = summed, given[0]
            assert x is not None
            reach = 1.01 * (x.reach * total + bias)
            made = [Interval(-reach, reach, x.nan)]
        read = [tensor.value for tensor in layer.get_inputs() if tensor is not None]
        carried = layer.kind in MOVES_DATA and any(value in self.doubtful for value in read)
        is_loose = layer.kind in ("Add", "Sub") or (
            layer.kind in MOVES_DATA | _SHOWING and any(value in self.loose for value in read)
        )
        for tensor, interval in zip(outputs, made, strict=False):
            self.known[tensor.value] = interval
            self._refuse_filling(layer, tensor, interval)
            if self._shows(layer, 0):
                self._require(tensor, LARGEST_HALF)
            elif layer.kind == "Log":
                self._require(tensor, _LOGARITHM)  # of zero OpenVINO has the least number
            in_doubt = layer.kind in _DOUBTFUL and summed is None and not interval.within(_SAFE)
            if tensor.dtype in dtypes.FLOATS and (carried or in_doubt):
                self.doubtful.add(tensor.value)
            if is_loose and not interval.within(_SAFE):
                self.loose.add(tensor.value)

    def _with_lost(self, layer: Layer, given: Sequence[Interval | None], made: Interval) -> Interval:
        """An interval with NaN, where a layer would make that of an infinity it may be given."""
        if layer.kind == "Attention":
            sizes = [x.shape[-1] for x in layer.get_inputs(0, 1) if x is not None]
            width = max((size for size in sizes if isinstance(size, int)), default=math.inf)
            lost = not math.prod(x.reach for x in given[:2] if x is not None) * width < _SURE
        elif layer.kind in _INWARD:
            lost = True
        elif may_divide_by_zero(layer):
            return Interval(-math.inf, math.inf, True)
        else:
            lost = layer.kind in _LOSES and not all(x is None or x.within(_SAFE) for x in given[:1])
        return Interval(made.low, made.high, made.nan or lost)

    def _refuse_filling(self, layer: Layer, made: Tensor, interval: Interval) -> None:
        is_filled = layer.kind == "ConstantOfShape" and made.dtype in dtypes.FLOATS
        if is_filled and not interval.within(_SAFE) and made.value not in self.masks:
            raise EngineError(f"{made.name} is filled with {interval.low:g}, and float16 does not hold it")

    def _refuse_constants(self, layer: Layer) -> None:
        if layer.kind in _COMPARISONS or has_large_bound(layer):
            return  # what they are given is finite
        for tensor in layer.get_inputs():
            values = None if tensor is None or tensor.dtype not in dtypes.FLOATS else torch_constant(tensor)
            if values is None or not values.numel():
                continue
            large = values[values.abs() > LARGEST_HALF]  # infinities too: OpenVINO makes 65504 of them
            is_mask = all(made.value in self.masks for made in layer.get_outputs()) and bool(
                (large < 0).all()
            )
            if large.numel() and not is_mask:
                raise EngineError(
                    f"a constant of {layer.kind} holds {float(large[0]):g}, and float16 does not"
                )
