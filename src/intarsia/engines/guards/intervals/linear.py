"""Intervals of sums, products of matrices, convolutions, norms and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from intarsia.engines.guards.intervals.interval import (
    INF,
    SQUARES_FIT,
    Given,
    Interval,
    add,
    around,
    constant_range,
    count,
    hull,
    mul,
    ranges_of,
    reduced_count,
    root_of_squares,
    times,
    torch_constant,
)
from intarsia.network.network import Layer, Tensor

ZERO = Interval(0, 0)


def _first(given: Given) -> Interval:
    assert given[0] is not None
    return given[0]


@ranges_of("ReduceSum")
def _sum(layer: Layer, given: Given) -> Interval:
    return times(reduced_count(layer), _first(given))


@ranges_of("ReduceMean")
def _mean(layer: Layer, given: Given) -> Interval:
    return _averaged(_first(given), reduced_count(layer))


def _averaged(x: Interval, elements: int) -> Interval:
    """No mean is beyond the elements, unless their sum is infinite."""
    total = times(elements, x)
    return Interval(-INF if total.low < -3e38 else x.low, INF if total.high > 3e38 else x.high, total.nan)


@ranges_of("ReduceL1")
def _l1(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    return times(reduced_count(layer), Interval(0, x.reach, x.nan))


@ranges_of("ReduceL2")
def _l2(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    total = times(reduced_count(layer), Interval(0, x.reach, x.nan))
    return total if x.reach < SQUARES_FIT else Interval(0, INF, x.nan)


@ranges_of("ReduceSumSquare")
def _sum_square(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    return times(reduced_count(layer), mul(Interval(0, x.reach, x.nan), Interval(0, x.reach)))


@ranges_of("ReduceLogSumExp")
def _log_sum_exp(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    return Interval(x.low, x.high + math.log(max(reduced_count(layer), 1)) + 1, x.nan or x.has_inf)


@ranges_of("CumSum")
def _cumsum(layer: Layer, given: Given) -> Interval:
    x, axis = layer.get_inputs(0, 1)
    assert x is not None and axis is not None
    known = axis.constant
    axes = range(x.ndim) if known is None else [int(known.reshape(-1)[0])]
    return hull(_first(given), times(count(x, axes), _first(given)))


@ranges_of("AveragePool", "GlobalAveragePool")
def _average(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    return _averaged(hull(_first(given), ZERO), count(x, range(2, x.ndim)))


def _reach_of_weight(weight: Tensor, over: Sequence[int]) -> float | None:
    """No less than the largest sum of magnitudes along these axes of a constant of floats."""
    values = torch_constant(weight)
    if values is None or not values.dtype.is_floating_point:
        return None
    if not values.numel():
        return 0.0
    if values.ndim > 2 and over[-1] == values.ndim - 1:
        return float(torch.linalg.vector_norm(values, 1, dim=list(over)).max())
    # Sums take ten times as long, and norms follow most matrices; no sum exceeds this.
    return math.sqrt(count(weight, over)) * root_of_squares(values)


def _product(x: Interval | None, weight: Interval | None, terms: int, total: float | None) -> Interval:
    """A sum of products of two operands; `total` is the largest sum of the second's magnitudes."""
    x = ZERO if x is None else x
    if total is None:
        assert weight is not None
        reach, broken = x.reach * weight.reach * terms, x.has_inf or weight.has_inf
    else:
        reach, broken = x.reach * total, x.has_inf or total == INF
    if broken:
        return Interval(-INF, INF, True)
    nan = x.nan or (weight is not None and weight.nan)
    return around(reach * 1.01 if isinstance(reach, float) else reach, nan)


def _matrix_product(layer: Layer, given: Given, transposed: tuple[int, int] = (0, 0)) -> Interval:
    a, b = layer.get_inputs(0, 1)
    assert a is not None and b is not None
    at_a = -2 if transposed[0] and a.ndim > 1 else -1
    at_b = -1 if transposed[1] or b.ndim == 1 else -2
    terms = min(count(a, [at_a]), count(b, [at_b]))
    if given[1] is None:
        x = Interval(-INF, INF, True) if given[0] is None else given[0]  # both are constants: be brief
        return _product(x, None, terms, _reach_of_weight(b, [at_b]))
    if given[0] is None:
        return _product(given[1], None, terms, _reach_of_weight(a, [at_a]))
    return _product(given[0], given[1], terms, None)


@ranges_of("MatMul")
def _matmul(layer: Layer, given: Given) -> Interval:
    return _matrix_product(layer, given)


@ranges_of("Gemm")
def _gemm(layer: Layer, given: Given) -> Interval:
    made = _matrix_product(layer, given, (layer.attribute("transA", 0), layer.attribute("transB", 0)))
    alpha, beta = layer.attribute("alpha", 1.0), layer.attribute("beta", 1.0)
    made = mul(made, Interval(alpha, alpha))
    bias = given[2] if len(given) > 2 and given[2] is not None else _bias(layer)
    return made if bias is None else add(made, mul(bias, Interval(beta, beta)))


def _bias(layer: Layer) -> Interval | None:
    inputs = layer.get_inputs()
    bias = inputs[2] if len(inputs) > 2 else None
    return None if bias is None else constant_range(bias)


@ranges_of("Conv", "ConvTranspose")
def _conv(layer: Layer, given: Given) -> Interval:
    weight = layer.get_inputs(1)[0]
    assert weight is not None
    turned = layer.kind == "ConvTranspose"
    over = [0, *range(2, weight.ndim)] if turned else list(range(1, weight.ndim))
    total = _reach_of_weight(weight, over) if given[1] is None else None
    made = _product(given[0], given[1], count(weight, over), total)
    bias = given[2] if len(given) > 2 and given[2] is not None else _bias(layer)
    return made if bias is None else add(made, bias)


@ranges_of("RotaryEmbedding")
def _rotary(layer: Layer, given: Given) -> Interval:
    x, cosine, sine = given[:3]
    assert x is not None and cosine is not None and sine is not None
    return add(mul(around(x.reach, x.nan), cosine), mul(around(x.reach, x.nan), sine))


def _normalized(x: Interval, width: int, scale: Interval | None, bias: Interval | None) -> Interval:
    """Elements of deviation one: none is larger than the root of their number."""
    broken = x.nan or x.reach > SQUARES_FIT
    made = around(math.sqrt(width) + 1, broken)
    made = made if scale is None else mul(made, scale)
    return made if bias is None else add(made, bias)


@ranges_of("LayerNormalization", "RMSNormalization")
def _layer_norm(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    axis = layer.attribute("axis", -1) % max(x.ndim, 1)
    scale, bias = [*given[1:], None, None][:2]
    return _normalized(_first(given), count(x, range(axis, x.ndim)), scale, bias)


@ranges_of("com.microsoft::SkipLayerNormalization")
def _skip_layer_norm(layer: Layer, given: Given) -> Sequence[Interval]:
    x, (one, other, scale, bias) = layer.get_inputs(0)[0], given[:4]
    assert x is not None and one is not None and other is not None
    total, unknown = add(one, other), Interval(-INF, INF, True)
    return [_normalized(total, count(x, [x.ndim - 1]), scale, bias), unknown, unknown, total]


@ranges_of("InstanceNormalization", "GroupNormalization")
def _instance_norm(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    return _normalized(_first(given), count(x, range(1, x.ndim)), given[1], given[2])


@ranges_of("BatchNormalization")
def _batch_norm(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    found = [None if tensor is None else torch_constant(tensor) for tensor in layer.get_inputs(1, 2, 3, 4)]
    if any(values is None for values in found) or found[0] is None:
        return Interval(-INF, INF, True)
    scale, bias, mean, variance = (values.double() for values in found if values is not None)
    slope = (scale / (variance + layer.attribute("epsilon", 1e-5)).sqrt()).abs()
    shift = slope * mean.abs() + bias.abs()
    reach = float((slope * x.reach + shift).max()) if scale.numel() else 0.0
    return Interval(-reach, reach, x.nan)


@ranges_of("Softmax")
def _softmax(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    return Interval(0, 1, x.nan or x.has_inf)  # a row of minus infinities has no softmax


@ranges_of("LogSoftmax")
def _log_softmax(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    return Interval(-INF if x.has_inf else x.low - x.high - 100, 0, x.nan or x.has_inf)


@ranges_of("Attention")
def _attention(layer: Layer, given: Given) -> Interval:
    query, key, value = given[:3]
    mask = given[3] if len(given) > 3 else None
    assert query is not None and key is not None and value is not None
    broken = any(i.nan or i.reach > SQUARES_FIT for i in (query, key, value))
    broken = broken or (mask is not None and (mask.nan or mask.high == INF))
    return Interval(-INF, INF, True) if broken else hull(value, ZERO)


@ranges_of("com.microsoft::MultiHeadAttention")
def _multi_head_attention(layer: Layer, given: Given) -> Interval:
    query, key, value, bias, _, mask = [*given, *[None] * 6][:6]
    if query is None or key is None or value is None:  # packed in one
        return Interval(-INF, INF, True)
    if bias is not None:
        query, key, value = add(query, bias), add(key, bias), add(value, bias)
    return _attention(layer, [query, key, value, mask])  # type: ignore[return-value]


@ranges_of("Resize")
def _resize(layer: Layer, given: Given) -> Interval:
    x = _first(given)
    if layer.attribute("mode", "nearest") != "cubic":
        return Interval(x.low, x.high, x.nan or x.has_inf)
    return around(3 * x.reach, x.nan or x.has_inf)


@ranges_of("GridSample")
def _grid_sample(layer: Layer, given: Given) -> Interval:
    x, grid = given
    assert x is not None and grid is not None
    return around(3 * x.reach, x.nan or x.has_inf or grid.nan or grid.has_inf)


@ranges_of("LSTM", "GRU", "RNN")
def _recurrent(layer: Layer, given: Given) -> Sequence[Interval]:
    some = [interval for interval in given if interval is not None]
    broken = any(i.nan or i.reach > SQUARES_FIT for i in some)
    start = given[5] if len(given) > 5 else None
    state = Interval(-1, 1) if start is None else hull(start, Interval(-1, 1))
    made = Interval(state.low, state.high, broken)
    x = layer.get_inputs(0)[0]
    assert x is not None
    cell = (given[6] if len(given) > 6 else None) or ZERO
    return [made, made, around(cell.reach + count(x, [0]), broken)]


@ranges_of("DequantizeLinear")
def _dequantize(layer: Layer, given: Given) -> Interval:
    x, scale = given[:2]
    zero = given[2] if len(given) > 2 else None
    assert x is not None and scale is not None
    return mul(around(x.reach + (0 if zero is None else zero.reach)), scale)
