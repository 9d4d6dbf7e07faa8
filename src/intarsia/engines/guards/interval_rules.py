"""From the intervals of a layer's operands to those of its results.

Weights, norms and functions with bounds limit a tensor; movement keeps a bound, sums and products widen it.
An operator without a rule may make any value, which costs another guard, or leaves a layer to PyTorch. Each
was left out in turn over `bench/specimens.py` (without that of sums BERT has 27 guards instead of 2, without
`_deviation` Llama 67 instead of 1); those without effect there are for integers and for sizes that vary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from intarsia.engines.guards.intervals import (
    ANYTHING,
    INF,
    ZERO,
    Interval,
    around,
    constant_range,
    fit,
    torch_constant,
    weight_sum,
    whole,
)
from intarsia.network import Layer, Tensor, dtypes
from intarsia.network.ops import MOVES_DATA, MULTIPLIES_WEIGHTS, NORMALIZES, OPS

_SQUARES_FIT = 1e18  # the square of a larger number may be infinite
_MOST_ELEMENTS = 2**40  # more than any tensor that fits a machine's memory has
_LONGEST = 2**31 - 1  # the largest size along one dimension

# An operand is None where the layer has none, and for a weight, which the rule looks at itself.

Operands = Sequence[Interval | None]
Rule = Callable[[Layer, Operands], Interval | Sequence[Interval]]
_Rule = TypeVar("_Rule", bound=Rule)
_RULES: dict[str, Rule] = {}


def layer_ranges(layer: Layer, operands: Operands) -> list[Interval]:
    """The interval of every output; an operator without a rule may make any value."""
    kinds = [tensor.dtype for tensor in layer.get_outputs()]
    rule = _RULES.get(layer.kind)
    if rule is None:
        return [whole(dtype) for dtype in kinds]
    results = rule(layer, operands)
    ranges = [results] if isinstance(results, Interval) else list(results)
    ranges += [whole(dtype) for dtype in kinds[len(ranges) :]]
    return [fit(dtype, interval) for dtype, interval in zip(kinds, ranges)]  # noqa: B905  (outputs may be left out)


def _ranges_of(*kinds: str) -> Callable[[_Rule], _Rule]:
    """Register the rule of operators."""

    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


def _bits(*operands: Interval) -> Interval:
    bits = max(max(int(i.high), -int(i.low) - 1).bit_length() for i in operands)
    return Interval(0 if all(i.low >= 0 for i in operands) else -(2**bits), 2**bits - 1)


def _greatest(*operands: Interval) -> Interval:
    return Interval(max(i.low for i in operands), max(i.high for i in operands), any(i.nan for i in operands))


def _activated(x: Interval, slope: float = 1.1) -> Interval:
    """Not further from zero than the operand, except for a slope and a summand; products may overflow."""
    return around(slope * x.reach + 2 * slope, x.nan) if x.reach < 1e37 else ANYTHING


_BY_OPERANDS: dict[str, Callable[..., Interval]] = {
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), _bits),
    **dict.fromkeys(("Gelu", "HardSwish", "Mish", "Softplus"), _activated),
    "Abs": abs,
    "Add": lambda *operands: functools.reduce(Interval.__add__, operands),
    "BitwiseNot": lambda x: _bits(x, Interval(-1, 0)),
    "Ceil": lambda x: x.map(math.ceil),
    "Concat": lambda *operands: functools.reduce(Interval.__or__, operands),
    "DequantizeLinear": lambda x, scale, zero=ZERO: (x - zero) * scale,
    "Exp": lambda x: x.map(math.exp),
    "Floor": lambda x: x.map(math.floor),
    "Max": _greatest,
    "Min": lambda *operands: -_greatest(*(-x for x in operands)),
    "Neg": lambda x: -x,
    "Reciprocal": lambda x: ANYTHING if x.has_zero or not x.is_finite else Interval(1 / x.high, 1 / x.low),
    "Relu": lambda x: x.map(lambda bound: max(bound, 0.0)),
    "Resize": lambda x, *_: _activated(x, 3),  # of cubic resizing; no other overshoots
    "RotaryEmbedding": lambda x, cosine, sine, *_: (x | -x) * cosine + (x | -x) * sine,
    "Round": lambda x: x.map(round),
    "Sqrt": lambda x: replace(x.map(lambda bound: math.sqrt(max(bound, 0.0))), nan=x.nan or x.low < 0),
    "Sub": Interval.__sub__,
}


@_ranges_of(*_BY_OPERANDS)
def _of_operands(layer: Layer, operands: Operands) -> Interval:
    return _BY_OPERANDS[layer.kind](*(i for i in operands if i is not None))


@_ranges_of("Elu", "LeakyRelu", "PRelu")
def _sloped(layer: Layer, operands: Operands) -> Interval:
    x, *slopes = (i for i in operands if i is not None)
    return _activated(x, max([abs(layer.attribute("alpha", 1.0)), 1.1, *(slope.reach for slope in slopes)]))


@_ranges_of(*(kind for kind, op in OPS.items() if op.range is not None))
def _bounded(layer: Layer, operands: Operands) -> Interval:
    """A function that has bounds. For infinities, and outside its domain, it may return NaN."""
    low, high = OPS[layer.kind].range or (-INF, INF)
    is_partial = layer.kind in ("Acos", "Asin")
    return Interval(low, high, is_partial or any(i is not None and not i.is_finite for i in operands))


@_ranges_of("Mul")
def _mul(layer: Layer, operands: Operands) -> Interval:
    (a, b), (x, y) = _pair(operands), layer.get_inputs()
    result = a * b
    if x == y:
        return Interval(0, result.high, a.nan)  # a square
    for one, other, reach in ((x, y, a.reach), (y, x, b.reach)):
        inverse = None if other is None else other.get_parent()
        if inverse is not None and inverse.kind == "Reciprocal" and reach < _SQUARES_FIT:
            deviation = _deviation(one, inverse.get_inputs(0)[0])
            result = result if deviation is None else result.cut(around(deviation, result.nan))
    return result


@_ranges_of("Div")
def _div(layer: Layer, operands: Operands) -> Interval:
    (a, b), (x, y) = _pair(operands), layer.get_inputs()
    if layer.get_outputs(0)[0].dtype in dtypes.INTEGERS:
        if b.low <= 0:
            return Interval(-a.reach, a.reach)
        quotients = [
            abs(int(n)) // int(d) * (1 if n > 0 else -1) for n in (a.low, a.high) for d in (b.low, b.high)
        ]
        return Interval(min(quotients), max(quotients))
    if b.has_zero or not b.is_finite:
        return ANYTHING
    result = a * Interval(1 / b.high, 1 / b.low)
    deviation = _deviation(x, y) if a.reach < _SQUARES_FIT else None
    return result if deviation is None else result.cut(around(deviation, result.nan))


def _pair(operands: Operands) -> tuple[Interval, Interval]:
    a, b = operands
    assert a is not None and b is not None
    return a, b


def _deviation(x: Tensor | None, root: Tensor | None) -> float | None:
    """How large x can be over sqrt(mean(x * x) + epsilon): the root of the number of elements."""
    layers: list[Layer] = []
    for kind in ("Sqrt", "Add", "ReduceMean", "MulPow"):
        layer = None if root is None else root.get_parent()
        if layer is None or layer.kind not in kind:
            return None
        layers.append(layer)
        root = layer.get_inputs(0)[0]
    _, offset, mean, square = layers
    epsilon, other = offset.get_inputs(1)[0], square.get_inputs(1)[0]
    if root != x or epsilon is None or epsilon.constant is None or (epsilon.constant < 0).any():
        return None
    power = None if other is None or square.kind == "Mul" else other.constant
    is_square = other == x if square.kind == "Mul" else power is not None and bool((power == 2).all())
    return 1.01 * math.sqrt(_reduced_count(mean)) if is_square else None


@_ranges_of("Mod")
def _mod(layer: Layer, operands: Operands) -> Interval:
    a, b = _pair(operands)
    if layer.get_outputs(0)[0].dtype not in dtypes.INTEGERS:
        return ANYTHING
    most, is_fmod = max(b.reach - 1, 0), layer.attribute("fmod", 0)
    negative, positive = (a.low < 0, a.high > 0) if is_fmod else (b.low < 0, b.high > 0)
    return Interval(-most if negative else 0, most if positive else 0)


@_ranges_of("Pow")
def _pow(layer: Layer, operands: Operands) -> Interval:
    a, b = _pair(operands)
    if b.low != b.high or not 0 <= b.low <= 64 or b.low != int(b.low):
        return whole(layer.get_outputs(0)[0].dtype)
    power = functools.reduce(Interval.__mul__, [a] * int(b.low), Interval(1, 1))
    return power if b.low % 2 else Interval(max(power.low, 0), power.high, power.nan)


@_ranges_of("Clip")
def _clip(layer: Layer, operands: Operands) -> Interval:
    x, low, high = [*operands, None, None][:3]
    assert x is not None
    x = x if low is None else _greatest(x, low)
    return x if high is None else -_greatest(-x, -high)


@_ranges_of("Where")
def _where(layer: Layer, operands: Operands) -> Interval:
    condition, then, other = layer.get_inputs()
    a, b = _pair(operands[1:])
    choice = None if condition is None else condition.get_parent()
    if choice is None or choice.get_inputs(0)[0] != other or choice.kind not in ("IsNaN", "Less"):
        return a | b
    if choice.kind == "IsNaN":
        return replace(a | b, nan=a.nan)  # nan_to_num: models clean their inputs with it
    # `where(x < 0, x + n, x)`, as converters write indices: each side sees half of x alone.
    zero, addition = choice.get_inputs(1)[0], None if then is None else then.get_parent()
    addends = [] if addition is None or addition.kind != "Add" else addition.get_inputs()
    offsets = [t for t in addends if t is not None and t.constant is not None and t.dtype in dtypes.INTEGERS]
    if zero is None or zero.constant is None or zero.constant.any() or other not in addends or not offsets:
        return a | b
    below = Interval(min(b.low, -1), min(b.high, -1)) + constant_range(offsets[0])
    return below | Interval(max(b.low, 0), max(b.high, 0))


@_ranges_of("Cast")
def _cast(layer: Layer, operands: Operands) -> Interval:
    x, dtype = _first(operands), layer.get_outputs(0)[0].dtype
    if dtype not in dtypes.INTEGERS:
        return x
    return x.map(math.trunc) if x.is_finite else whole(dtype)


def _first(operands: Operands) -> Interval:
    assert operands[0] is not None
    return operands[0]


def _data(layer: Layer, place: int = 0) -> Tensor:
    x = layer.get_inputs(place)[0]
    assert x is not None
    return x


def _count(tensor: Tensor, axes: Sequence[int] | None = None) -> int:
    """How many elements there are along some axes, or a number beyond any that fits a machine."""
    sizes = tensor.shape if axes is None else [tensor.shape[axis] for axis in axes]
    return math.prod(size if isinstance(size, int) else _MOST_ELEMENTS for size in sizes)


_SOURCES = {"Pad": (0, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2)}  # of elements; of others the first


@_ranges_of(*(MOVES_DATA - {"Concat", "Where"}), "ReduceMax", "ReduceMin")
def _moved(layer: Layer, operands: Operands) -> Sequence[Interval]:
    reduction, updates = layer.attribute("reduction", "none"), operands[-1]
    if reduction == "add" and updates is not None:  # as many as there are may meet in one element
        return [_first(operands) + _sum(_count(_data(layer, 2)), updates)]
    if reduction not in ("none", "max", "min"):
        return [whole(layer.get_outputs(0)[0].dtype)]
    sources = [operands[place] for place in _SOURCES.get(layer.kind, (0,)) if place < len(operands)]
    interval = functools.reduce(Interval.__or__, [source for source in sources if source is not None])
    return [interval | ZERO if layer.kind in ("Pad", "Trilu") else interval] * len(layer.get_outputs())


@_ranges_of("ArgMax", "ArgMin", "MaxPool", "NonZero", "Shape", "Size", "TopK")
def _places(layer: Layer, operands: Operands) -> Sequence[Interval]:
    """Places and sizes: along an axis, along any, or of all elements."""
    x, kind = _data(layer), layer.kind
    sizes = [size if isinstance(size, int) else _LONGEST for size in x.shape] or [1]
    if kind in ("ArgMax", "ArgMin", "TopK"):
        most = sizes[layer.attribute("axis", -1 if kind == "TopK" else 0)] - 1
    elif kind in ("NonZero", "Shape"):
        most = max(sizes) - (kind == "NonZero")
    else:
        most = min(_count(x), _LONGEST)
    places = Interval(0, max(most, 0))
    has_values = kind in ("MaxPool", "TopK")
    return [_first(operands) if has_values else places, *[places] * (len(layer.get_outputs()) - 1)]


@_ranges_of("Range")
def _range(layer: Layer, operands: Operands) -> Interval:
    start, limit, step = (i for i in operands if i is not None)
    return Interval(start.low, max(start.low, limit.high)) if step.low > 0 else start | limit


@_ranges_of("ConstantOfShape")
def _filled(layer: Layer, operands: Operands) -> Interval:
    value: Any = layer.attribute("value")
    item = 0 if value is None else np.ravel(value.numpy() if hasattr(value, "numpy") else value)[0].item()
    return Interval(item, item) if item == item else ANYTHING


def _reduced_count(layer: Layer) -> int:
    """The number of elements that a reduction combines into one."""
    x, named = _data(layer), [*layer.get_inputs(), None][1]
    if named is None or named.constant is None or not named.constant.size:
        return 1 if named is None and layer.attribute("noop_with_empty_axes", 0) else _count(x)
    return _count(x, [int(axis) for axis in named.constant.reshape(-1)])


def _sum(count: int, x: Interval) -> Interval:
    """A sum of up to `count` elements, added in any order; one of floats with all its roundings."""
    ends = Interval(count, count) * (x | ZERO)
    low, high = (end if isinstance(end, int) else end * 1.01 for end in (ends.low, ends.high))
    return Interval(low, high, x.nan or (low < -3e38 and high > 3e38))


@_ranges_of("ReduceSum", "CumSum", "ReduceL2")
def _reduced_sum(layer: Layer, operands: Operands) -> Interval:
    """A sum, or a length: no more than the sum of magnitudes (ConvNeXt V2: 1 guard instead of 11)."""
    x, is_length = _first(operands), layer.kind == "ReduceL2"
    if is_length and x.reach >= _SQUARES_FIT:
        return Interval(0, INF, x.nan)
    return _sum(_reduced_count(layer), abs(x) if is_length else x)


@_ranges_of("ReduceMean", "AveragePool", "GlobalAveragePool")
def _mean(layer: Layer, operands: Operands) -> Interval:
    """No mean is beyond the elements, unless their sum is infinite."""
    is_pool, x = layer.kind != "ReduceMean", _first(operands)
    count = _count(_data(layer), range(2, _data(layer).ndim)) if is_pool else _reduced_count(layer)
    mean, total = x | ZERO if is_pool else x, _sum(count, x)
    return Interval(
        mean.low if total.low > -3e38 else -INF, mean.high if total.high < 3e38 else INF, total.nan
    )


@_ranges_of(*MULTIPLIES_WEIGHTS)
def _product(layer: Layer, operands: Operands) -> Interval:
    """Sums of products along some axes of a weight, or of a second operand."""
    a, b, bias = [*layer.get_inputs(), None][:3]
    assert a is not None and b is not None
    x, other, added = [*operands, None][:3]
    if layer.kind == "Conv":
        over = list(range(1, b.ndim))
    elif layer.kind == "ConvTranspose":
        over = [0, *range(2, b.ndim)]
    else:
        over = [-1 if b.ndim == 1 or layer.attribute("transB", 0) else -2]
        if x is None:
            (a, b), (x, other), over = (
                (b, a),
                (other, x),
                [-2 if layer.attribute("transA", 0) and a.ndim > 1 else -1],
            )
    total = weight_sum(b, over) if other is None else other.reach * _count(b, over)
    if x is None or total is None or not total < INF or not x.reach < INF:
        return ANYTHING
    reach = x.reach * total * abs(layer.attribute("alpha", 1.0))
    sums = around(
        reach if isinstance(reach, int) else reach * 1.01, x.nan or (other is not None and other.nan)
    )
    if bias is None:
        return sums
    beta = layer.attribute("beta", 1.0)
    return sums + (constant_range(bias) if added is None else added) * Interval(beta, beta)


@_ranges_of(*NORMALIZES)
def _normalized(layer: Layer, operands: Operands) -> Interval:
    """Elements of deviation one: none is larger than the root of their number."""
    x, interval = _data(layer), _first(operands)
    is_last = layer.kind not in ("GroupNormalization", "InstanceNormalization")
    width = _count(x, range(layer.attribute("axis", -1) % max(x.ndim, 1) if is_last else 1, x.ndim))
    scale, bias = [*operands[1:], None, None][:2]
    unit = around(math.sqrt(width) + 1, interval.nan or interval.reach > _SQUARES_FIT)
    return unit * (scale or Interval(1, 1)) + (bias or ZERO)


@_ranges_of("com.microsoft::SkipLayerNormalization")
def _skip_layer_norm(layer: Layer, operands: Operands) -> Sequence[Interval]:
    total = functools.reduce(Interval.__add__, _pair(operands[:2]))
    return [_normalized(layer, [total, *operands[2:]]), ANYTHING, ANYTHING, total]


@_ranges_of("BatchNormalization")
def _batch_norm(layer: Layer, operands: Operands) -> Interval:
    x, statistics = _first(operands), list(map(torch_constant, layer.get_inputs(1, 2, 3, 4)))  # type: ignore[arg-type]
    if any(values is None for values in statistics):
        return ANYTHING
    scale, bias, mean, variance = (values.double() for values in statistics if values is not None)
    slope = (scale / (variance + layer.attribute("epsilon", 1e-5)).sqrt()).abs()
    reach = slope * x.reach + slope * mean.abs() + bias.abs()
    return around(float(reach.max()) if reach.numel() else 0.0, x.nan)


@_ranges_of("Attention", "com.microsoft::MultiHeadAttention")
def _attention(layer: Layer, operands: Operands) -> Interval:
    padded: list[Interval | None] = [*operands, *[None] * 6]
    query, key, value, mask, *others = padded
    if layer.kind != "Attention":
        bias, mask = mask or ZERO, others[1]
        query, key, value = [None if x is None else x + bias for x in (query, key, value)]
    if query is None or key is None or value is None:  # packed in one
        return ANYTHING
    broken = any(not x.is_finite or x.reach > _SQUARES_FIT for x in (query, key, value))
    broken = broken or (mask is not None and (mask.nan or mask.high == INF))
    return ANYTHING if broken else value | ZERO
