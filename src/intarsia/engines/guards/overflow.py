"""What must hold of a network's numbers so that float16, which ends at 65504, can stand for a longer type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir
import torch

from intarsia.engines.guards.intervals import Interval, layer_ranges, range_of, whole
from intarsia.engines.guards.intervals.rules import torch_constant
from intarsia.engines.guards.kinds import AnyGuard, Guards, Largest, ValueGuard
from intarsia.engines.guards.limits import KEEPS_VALUES
from intarsia.errors import EngineError
from intarsia.network import Layer, Network, Tensor, dtypes

LARGEST_HALF = 65504.0
_SURE = 60000.0  # below it no rounding makes an infinity
_SMALL = 1 << 15  # elements
_CALM = 2.0**36  # the sum of a million numbers, each the largest
_SAFE = Interval(-_SURE, _SURE)
_LOGARITHM = 100.0  # far beyond that of any number
_TINY = 2.0**-14  # of less, digits are lost
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# fmt: off
_MOVES = KEEPS_VALUES | frozenset(
    {
        "Concat", "DepthToSpace", "Gather", "GatherElements", "GatherND", "Pad", "ScatterElements",
        "ScatterND", "Slice", "SpaceToDepth", "Split", "Tile", "Where",
    }
)
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
_LOSES = frozenset({"Gelu", "HardSwish", "LogSoftmax", "Mish", "Softmax", "Swish"})  # -inf * 0, inf - inf
_NORMS = frozenset({"GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"})
_BOUNDS = frozenset({"Clip", "Max", "Min"})
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
        self.doubtful = {tensor.value for tensor in floats}  # they may be NaN
        self.masks = _masks(self.layers, net)
        self.guards: dict[ir.Value, list[AnyGuard]] = {}
        self.inputs = {tensor.value for tensor in net.get_inputs()}
        self.sums: dict[Layer, tuple[float, float] | None] = {}

    def run(self) -> list[AnyGuard]:
        for layer in self.layers:
            self._refuse_constants(layer)
            if layer.kind not in _MOVES:
                self._stand(layer)
            self._note(layer)
        for tensor in self.net.get_outputs():
            self._require(tensor, LARGEST_HALF)
        return [guard for guards in self.guards.values() for guard in guards]

    def _stand(self, layer: Layer) -> None:
        saturates = layer.kind in _SATURATING and not _has_large_bound(layer)
        if layer.kind in ("Add", "Sub") and self._is_of_one(layer):
            return
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is None or not _is_computed(tensor):
                continue
            if saturates and tensor.value in self.doubtful:
                self._require(tensor, LARGEST_HALF)
            elif not saturates and not self._shows(layer, index):
                self._require(tensor, self._most(layer, tensor, index))

    def _is_of_one(self, layer: Layer) -> bool:
        """Whether but one of two summands may be an infinity, which then is that of the sum."""
        given = [tensor for tensor in layer.get_inputs() if tensor is not None]
        may_be = [tensor for tensor in given if not range_of(tensor, self.known).within(_SAFE)]
        return len(may_be) < 2 and not any(tensor.value in self.doubtful for tensor in may_be)

    def _shows(self, layer: Layer, index: int) -> bool:
        """Whether the result of a product is watched: an overflow anywhere in it is seen there.

        So it is of small ones, and of convolutions whose kernel may transform what it adds up. Of others the
        operand is, by its limit, so that their kernels can go on with the next layer.
        """
        if index != 0 or layer.kind not in _PRODUCTS:
            return False
        sizes = [size if isinstance(size, int) else _SMALL for size in layer.get_outputs(0)[0].shape]
        return math.prod(sizes) <= _SMALL or _may_transform(layer)

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
            self.sums[layer] = _sums_of_weights(layer, positive)
        return self.sums[layer]

    def _require(self, tensor: Tensor, most: float) -> None:
        """Let a tensor stay within a limit from here on, by a guard if it is not known to."""
        if not _is_computed(tensor) or 0 in tensor.shape:
            return
        least = -math.inf if tensor.value in self.masks else -most
        found = range_of(tensor, self.known)
        if not found.within(Interval(least, min(most, _SURE))):
            self._watch(tensor, found, least, most)
            # What is finite counts as sure; where it is too large to add to, the sum is looked at as well.
            self.known[tensor.value] = found.cut(Interval(max(least, -_SURE), min(most, _SURE)))
        self.doubtful.discard(tensor.value)

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
        summed = self._weighed(layer, layer.get_inputs(0)[0]) if layer.kind in _PRODUCTS else None
        if summed is None:
            made = [self._with_lost(layer, given, interval) for interval in layer_ranges(layer, given)]
        else:
            (total, bias), x = summed, given[0]
            assert x is not None
            reach = 1.01 * (x.reach * total + bias)
            made = [Interval(-reach, reach, x.nan)]
        carried = layer.kind in _MOVES and any(
            tensor is not None and tensor.value in self.doubtful for tensor in layer.get_inputs()
        )
        for tensor, interval in zip(outputs, made, strict=False):
            self.known[tensor.value] = interval
            if self._shows(layer, 0):
                self._require(tensor, LARGEST_HALF)
            elif layer.kind == "Log":
                self._require(tensor, _LOGARITHM)  # of zero OpenVINO has the least number
            in_doubt = layer.kind in _DOUBTFUL and summed is None and not interval.within(_SAFE)
            if tensor.dtype in dtypes.FLOATS and (carried or in_doubt):
                self.doubtful.add(tensor.value)

    def _with_lost(self, layer: Layer, given: Sequence[Interval | None], made: Interval) -> Interval:
        """An interval with NaN, where a layer would make that of an infinity it may be given."""
        if layer.kind == "Attention":
            (query, key), width = layer.get_inputs(0, 1), 0
            sizes = [x.shape[-1] for x in (query, key) if x is not None and isinstance(x.shape[-1], int)]
            width = max(sizes, default=0)
            reach = math.prod(x.reach for x in given[:2] if x is not None) * width
            lost = not width or not reach < _SURE
        elif layer.kind in _NORMS:
            lost = True  # a variance, the difference of two large numbers, may be less than 0
        elif _may_divide_by_zero(layer):
            return Interval(-math.inf, math.inf, True)
        else:
            lost = layer.kind in _LOSES and not all(x is None or x.within(_SAFE) for x in given[:1])
        return Interval(made.low, made.high, made.nan or lost)

    def _refuse_constants(self, layer: Layer) -> None:
        if layer.kind in _COMPARISONS or _has_large_bound(layer):
            return  # what they are given is finite
        for tensor in layer.get_inputs():
            if tensor is None or tensor.dtype not in dtypes.FLOATS or tensor.constant is None:
                continue
            values = torch_constant(tensor)
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


def _is_computed(tensor: Tensor) -> bool:
    return tensor.dtype in dtypes.FLOATS and tensor.constant is None


def _may_divide_by_zero(layer: Layer) -> bool:
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


def _may_transform(layer: Layer) -> bool:
    """Whether a convolution may be computed by Winograd's transform, whose sums are far larger."""
    weight = layer.get_inputs(1)[0]
    if layer.kind != "Conv" or weight is None or layer.attribute("group", 1) != 1:
        return False
    steps = [*layer.attribute("strides", ()), *layer.attribute("dilations", ())]
    return any(size != 1 for size in weight.shape[2:]) and all(step == 1 for step in steps)


def _has_large_bound(layer: Layer) -> bool:
    """Whether a layer keeps numbers below a bound that float16 does not hold."""
    if layer.kind not in _BOUNDS:
        return False
    given = [tensor.constant for tensor in layer.get_inputs() if tensor is not None]
    return any(bound is not None and bool((abs(bound) > LARGEST_HALF).any()) for bound in given)


def _sums_of_weights(layer: Layer, positive: bool) -> tuple[float, float] | None:
    """The most that weights can add up to in one number of a product, of `positive` numbers, and its bias.

    None where it is no product by constant weights.
    """
    if layer.kind not in _PRODUCTS:
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
    sums = [values.clamp(min=0).sum(over), values.clamp(max=0).sum(over).neg()]
    most = torch.maximum(*sums) if positive else sums[0] + sums[1]
    ends = [float(bias.abs().max()) for bias in biases if bias is not None and bias.numel()]
    return (
        float(most.max()) * abs(layer.attribute("alpha", 1.0)) if most.numel() else 0.0,
        max(ends, default=0.0) * abs(layer.attribute("beta", 1.0)),
    )


def _masks(layers: list[Layer], net: Network) -> set[ir.Value]:
    """The values of which a softmax alone sees anything: minus infinity is what masks are made of."""
    found: set[ir.Value] = set()
    outputs = {tensor.value for tensor in net.get_outputs()}
    uses: dict[ir.Value, list[tuple[Layer, int]]] = {}
    for layer in layers:
        for index, tensor in enumerate(layer.get_inputs()):
            if tensor is not None:
                uses.setdefault(tensor.value, []).append((layer, index))

    def is_masked(layer: Layer, index: int) -> bool:
        if layer.kind in ("Softmax", "LogSoftmax") or (layer.kind == "Attention" and index == 3):
            return True
        passes = layer.kind in _MOVES or layer.kind == "Add"
        return passes and all(made.value in found for made in layer.get_outputs())

    for layer in reversed(layers):
        for tensor in layer.get_outputs():
            read = uses.get(tensor.value, [])
            if read and tensor.value not in outputs and all(is_masked(*use) for use in read):
                found.add(tensor.value)
    return found
