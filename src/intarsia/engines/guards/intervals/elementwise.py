"""Intervals of what is computed element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import onnx_ir as ir

from intarsia.engines.guards.intervals.interval import (
    BOOL,
    INF,
    SQUARES_FIT,
    Given,
    Interval,
    add,
    around,
    constant_range,
    hull,
    mul,
    neg,
    ranges_of,
    reduced_count,
    whole,
)
from intarsia.network import dtypes
from intarsia.network.network import Layer, Tensor


def _is_int(layer: Layer) -> bool:
    return layer.get_outputs(0)[0].dtype in dtypes.INTEGERS


def _some(given: Given) -> list[Interval]:
    return [interval for interval in given if interval is not None]


@ranges_of("Add", "Sum")
def _add(layer: Layer, given: Given) -> Interval:
    total, *others = _some(given)
    for other in others:
        total = add(total, other)
    return total


@ranges_of("Sub")
def _sub(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    return add(a, neg(b))


@ranges_of("Mul")
def _mul(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    x, y = layer.get_inputs()
    assert x is not None and y is not None
    made = mul(a, b)
    if x == y:
        return Interval(0, made.high, a.nan)  # a square
    for one, other, reach in ((x, y, a.reach), (y, x, b.reach)):
        deviation = root_mean_square(one, _source(other, "Reciprocal"))
        if deviation is not None and reach < SQUARES_FIT:
            return made.cut(around(deviation, made.nan))
    return made


def _source(tensor: Tensor | None, kind: str) -> Tensor | None:
    """What a layer of this kind made a tensor of."""
    parent = None if tensor is None else tensor.get_parent()
    return parent.get_inputs(0)[0] if parent is not None and parent.kind == kind else None


def root_mean_square(x: Tensor, root: Tensor | None) -> float | None:
    """How large x can be over sqrt(mean(x * x) + epsilon): the root of the number of elements."""
    mean = _source(_source(root, "Sqrt"), "Add")
    parent = None if mean is None else mean.get_parent()
    squares = None if parent is None or parent.kind != "ReduceMean" else parent.get_inputs(0)[0]
    made = None if squares is None else squares.get_parent()
    if parent is None or made is None or made.kind not in ("Mul", "Pow") or made.get_inputs(0)[0] != x:
        return None
    other = made.get_inputs(1)[0]
    assert other is not None
    is_square = other == x if made.kind == "Mul" else constant_range(other)[:2] == (2, 2)
    return 1.01 * math.sqrt(reduced_count(parent)) if is_square else None


@ranges_of("Div")
def _div(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    if _is_int(layer):
        return _divide_ints(a, b)
    if b.has_zero:
        signless = a.low >= 0 and b.low >= 0
        return Interval(
            0 if signless else -INF, INF, a.nan or b.nan or a.has_zero or (a.has_inf and b.has_inf)
        )
    ends = [_quotient(x, y) for x, y in product((a.low, a.high), (b.low, b.high))]
    made = Interval(min(ends), max(ends), a.nan or b.nan or (a.has_inf and b.has_inf))
    x, y = layer.get_inputs(0, 1) if layer.kind == "Div" else (None, None)
    deviation = None if x is None or a.reach >= SQUARES_FIT else root_mean_square(x, y)
    return made if deviation is None else made.cut(around(deviation, made.nan))


def _quotient(a: float, b: float) -> float:
    return 0.0 if abs(b) == INF else a / b


def _divide_ints(a: Interval, b: Interval) -> Interval:
    parts = [(low, high) for low, high in ((b.low, min(b.high, -1)), (max(b.low, 1), b.high)) if low <= high]
    ends = [_cut_quotient(x, y) for low, high in parts for x, y in product((a.low, a.high), (low, high))]
    ends = ends or [0]
    return Interval(min(ends), max(ends))


def _cut_quotient(a: float, b: float) -> int:
    size = abs(int(a)) // abs(int(b))
    return size if (a < 0) == (b < 0) else -size


@ranges_of("Mod")
def _mod(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    if not _is_int(layer):
        return around(b.reach, a.nan or b.nan or b.has_zero or a.has_inf)
    most = max(b.reach - 1, 0)
    if layer.attribute("fmod", 0):
        return Interval(-min(most, -min(a.low, 0)), min(most, max(a.high, 0)))
    if a.low >= 0 and b.low > a.high:
        return a
    return Interval(0 if b.low >= 0 else -most, 0 if b.high <= 0 else most)


@ranges_of("Pow")
def _pow(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    dtype = layer.get_outputs(0)[0].dtype
    if b.low == b.high and not b.nan and 0 <= b.low <= 64 and b.low == int(b.low):
        power = int(b.low)
        low, high = _power(a.low, power), _power(a.high, power)
        if power % 2:
            return Interval(low, high, a.nan)
        return Interval(0 if a.low < 0 < a.high else min(low, high), max(low, high), a.nan)
    if dtype in dtypes.INTEGERS or a.low < 0:
        return whole(dtype)
    if b.low == b.high and a.high < INF:  # a root, or its reciprocal
        ends = [_real_power(x, b.low) for x in (a.low, a.high)]
        return Interval(min(ends), max(ends), a.nan)
    return Interval(0, INF, True)


def _power(base: float, power: int) -> float:
    try:
        return base**power
    except OverflowError:
        return INF if base > 0 or power % 2 == 0 else -INF


def _real_power(base: float, power: float) -> float:
    if base == 0:
        return INF if power < 0 else 0.0
    try:
        return float(base**power)
    except OverflowError:
        return INF


@ranges_of("Max")
def _max(layer: Layer, given: Given) -> Interval:
    some = _some(given)
    return Interval(max(i.low for i in some), max(i.high for i in some), any(i.nan for i in some))


@ranges_of("Min")
def _min(layer: Layer, given: Given) -> Interval:
    some = _some(given)
    return Interval(min(i.low for i in some), min(i.high for i in some), any(i.nan for i in some))


@ranges_of("Clip")
def _clip(layer: Layer, given: Given) -> Interval:
    x, low, high = [*given, None, None][:3]
    assert x is not None
    made = x
    if low is not None:
        made = Interval(max(made.low, low.low), max(made.high, low.high), made.nan or low.nan)
    if high is not None:
        made = Interval(min(made.low, high.low), min(made.high, high.high), made.nan or high.nan)
    return made


@ranges_of("Abs")
def _abs(layer: Layer, given: Given) -> Interval:
    (x,) = _some(given)
    return Interval(0 if x.low < 0 < x.high else min(abs(x.low), abs(x.high)), x.reach, x.nan)


@ranges_of("Neg")
def _neg(layer: Layer, given: Given) -> Interval:
    return neg(_some(given)[0])


@ranges_of("Where")
def _where(layer: Layer, given: Given) -> Interval:
    condition, one, other = layer.get_inputs()
    _, a, b = _some(given)
    assert condition is not None and one is not None and other is not None
    made = hull(a, b)
    asked = condition.get_parent()
    if asked is not None and asked.kind == "IsNaN" and asked.get_inputs(0)[0] == other:
        return Interval(made.low, made.high, a.nan)
    if asked is not None and asked.kind == "Less" and (x := asked.get_inputs(0)[0]) == other:
        return _wrapped(layer, given, asked, x) or made
    return made


def _wrapped(layer: Layer, given: Given, asked: Layer, x: Tensor | None) -> Interval | None:
    """`where(x < 0, x + n, x)`, as indices are counted from the end: each side sees half of x alone."""
    bound, then = asked.get_inputs(1)[0], layer.get_inputs(1)[0]
    made = None if then is None else then.get_parent()
    if bound is None or bound.constant is None or made is None or made.kind != "Add":
        return None
    addends = made.get_inputs()
    if x not in addends or given[2] is None:
        return None
    added = addends[1] if addends[0] == x else addends[0]
    if added is None or added.constant is None:
        return None
    zero, whole_x, offset = constant_range(bound), given[2], constant_range(added)
    below = Interval(min(whole_x.low, zero.high - 1), min(whole_x.high, zero.high - 1))
    above = Interval(max(whole_x.low, zero.low), max(whole_x.high, zero.low), whole_x.nan)
    return hull(add(below, offset), above) if _is_int(layer) else None


@ranges_of(
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"
)
def _truth(layer: Layer, given: Given) -> Interval:
    return BOOL


@ranges_of("Cast", "CastLike")
def _cast(layer: Layer, given: Given) -> Interval:
    x, dtype = _some(given)[0], layer.get_outputs(0)[0].dtype
    if dtype == ir.DataType.BOOL or dtype not in dtypes.INTEGERS:
        return x
    if x.nan or x.has_inf:
        return whole(dtype)
    return Interval(math.trunc(x.low), math.trunc(x.high))


@ranges_of("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
def _bitwise(layer: Layer, given: Given) -> Interval:
    some = _some(given)
    if layer.kind == "BitwiseAnd" and any(i.low >= 0 for i in some):
        return Interval(0, min(i.high for i in some if i.low >= 0))
    bits = max(max(int(i.high), -int(i.low) - 1).bit_length() for i in some)
    signless = all(i.low >= 0 for i in some) and layer.kind != "BitwiseNot"
    return Interval(0 if signless else -(2**bits), 2**bits - 1)


@ranges_of("BitShift")
def _shift(layer: Layer, given: Given) -> Interval:
    a, b = _some(given)
    if layer.attribute("direction") == "RIGHT":
        return hull(a, Interval(0, 0))
    return whole(layer.get_outputs(0)[0].dtype) if b.high > 64 else mul(a, Interval(1, 2 ** int(b.high)))


def _curve(*kinds: str) -> Callable[[Callable[[Layer, Interval], Interval]], None]:
    """Register functions of one operand."""

    def register(function: Callable[[Layer, Interval], Interval]) -> None:
        ranges_of(*kinds)(lambda layer, given: function(layer, _some(given)[0]))

    return register


def _rises(function: Callable[[float], float], *kinds: str) -> None:
    """Register functions that rise, and are defined everywhere."""

    def end(bound: float) -> float:
        try:
            return function(bound)
        except OverflowError:
            return INF if bound > 0 else -INF

    _curve(*kinds)(lambda layer, x: Interval(end(x.low), end(x.high), x.nan))


def _whole_floor(bound: float) -> float:
    return bound if abs(bound) == INF else math.floor(bound)


def _whole_ceil(bound: float) -> float:
    return bound if abs(bound) == INF else math.ceil(bound)


_rises(lambda x: max(x, 0), "Relu")
_rises(_whole_floor, "Floor")
_rises(_whole_ceil, "Ceil")
_rises(lambda x: 0.0 if x == -INF else math.exp(x), "Exp")
_rises(math.sinh, "Sinh")
_rises(math.asinh, "Asinh")
_curve("Softplus")(lambda layer, x: Interval(0, max(x.high, 0.0) + 0.7, x.nan))
_curve("Round")(lambda layer, x: Interval(_whole_floor(x.low), _whole_ceil(x.high), x.nan))
_curve("Sigmoid", "HardSigmoid")(lambda layer, x: Interval(0, 1, x.nan))
_curve("Tanh", "Erf", "Sign")(lambda layer, x: Interval(-1, 1, x.nan))
_curve("Softsign")(lambda layer, x: Interval(-1, 1, x.nan or x.has_inf))
_curve("Sin", "Cos")(lambda layer, x: Interval(-1, 1, x.nan or x.has_inf))
_curve("Tan")(lambda layer, x: Interval(-INF, INF, x.nan or x.has_inf))
_curve("Atan")(lambda layer, x: Interval(-1.6, 1.6, x.nan))
_curve("Asin", "Acos")(lambda layer, x: Interval(-1.6, 3.2, x.nan or x.reach > 1))
_curve("Atanh")(lambda layer, x: Interval(-INF, INF, x.nan or x.reach > 1))
_curve("Acosh")(lambda layer, x: Interval(0, INF, x.nan or x.low < 1))
_curve("Cosh")(lambda layer, x: Interval(1, INF, x.nan))
_curve("Log")(lambda layer, x: Interval(_log(x.low), _log(x.high), x.nan or x.low < 0))
_curve("Sqrt")(lambda layer, x: Interval(_sqrt(x.low), _sqrt(x.high), x.nan or x.low < 0))
_curve("Gelu", "HardSwish", "Mish")(
    lambda layer, x: Interval(-0.5, INF if x.high > 1e37 else max(x.high, 0), x.nan or x.reach > 1e37)
)
_curve("LeakyRelu")(lambda layer, x: hull(x, mul(x, _point(layer.attribute("alpha", 0.01)))))
_curve("Elu", "Selu", "Celu")(lambda layer, x: _saturating(x, max(abs(layer.attribute("alpha", 1.7)), 1)))


def _saturating(x: Interval, most: float) -> Interval:
    return Interval(-1.1 * most, max(1.1 * x.high, most), x.nan)


def _point(value: float) -> Interval:
    return Interval(value, value)


def _log(x: float) -> float:
    return -INF if x <= 0 else INF if x == INF else math.log(x)


def _sqrt(x: float) -> float:
    return 0.0 if x <= 0 else math.sqrt(x)


@ranges_of("PRelu")
def _prelu(layer: Layer, given: Given) -> Interval:
    x, slope = _some(given)
    return hull(x, mul(x, slope))


@ranges_of("Reciprocal")
def _reciprocal(layer: Layer, given: Given) -> Interval:
    return _div(layer, [_point(1.0), given[0]])  # type: ignore[return-value]
