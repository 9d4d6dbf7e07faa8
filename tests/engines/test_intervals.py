"""Intervals hold whatever a program computes: random programs of integers and of floats, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from intarsia.engines.guards.interval_rules import layer_ranges
from intarsia.engines.guards.intervals import Interval, is_weight, range_of, whole
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

INT, FLOAT = torch.int64, torch.float32
Step = tuple[Callable[..., Tensor], Callable[..., torch.Tensor], int]


def number(value: int) -> Tensor:
    return F.constant(value, INT)


# Each: the layer, what torch computes, and the number of operands.
INTEGER_STEPS: dict[str, Step] = {
    "Add": (F.add, torch.add, 2),
    "Sub": (F.sub, torch.sub, 2),
    "Mul": (F.mul, torch.mul, 2),
    "square": (lambda a: F.mul(a, a), lambda a: a * a, 1),
    "Div": (
        lambda a, b: F.div(a, F.maximum(F.abs(b), number(1))),
        lambda a, b: torch.div(a, b.abs().clamp(min=1), rounding_mode="trunc"),
        2,
    ),
    "Mod": (
        lambda a, b: F.mod(a, F.maximum(F.abs(b), number(1))),
        lambda a, b: torch.remainder(a, b.abs().clamp(min=1)),
        2,
    ),
    "Mod by a negative": (lambda a: F.mod(a, number(-7)), lambda a: torch.remainder(a, -7), 1),
    "fmod": (lambda a: F.mod(a, number(7), fmod=True), lambda a: torch.fmod(a, 7), 1),
    "Max": (F.maximum, torch.maximum, 2),
    "Min": (F.minimum, torch.minimum, 2),
    "Clip": (lambda a: F.clip(a, number(-3), number(11)), lambda a: a.clamp(-3, 11), 1),
    "Abs": (F.abs, torch.abs, 1),
    "Neg": (F.neg, torch.neg, 1),
    "Sign": (F.sign, torch.sign, 1),
    "Pow": (lambda a: F.pow(a, number(3)), lambda a: a**3, 1),
    "even Pow": (lambda a: F.pow(a, number(2)), lambda a: a**2, 1),
    "Where": (lambda a, b: F.where(F.less(a, b), a, b), lambda a, b: torch.where(a < b, a, b), 2),
    "wrapped index": (
        lambda a: F.where(F.less(a, number(0)), F.add(a, number(9)), a),
        lambda a: torch.where(a < 0, a + 9, a),
        1,
    ),
    "And": (F.bitwise_and, torch.bitwise_and, 2),
    "Or": (F.bitwise_or, torch.bitwise_or, 2),
    "Xor": (F.bitwise_xor, torch.bitwise_xor, 2),
    "Not": (F.bitwise_not, torch.bitwise_not, 1),
    "ReduceSum": (lambda a: F.reduce_sum(a, [-1]), lambda a: a.sum(-1, True).expand_as(a), 1),
    "ReduceMax": (lambda a: F.reduce_max(a, [0]), lambda a: a.amax(0, True).expand_as(a), 1),
    "CumSum": (lambda a: F.cumsum(a, 1), lambda a: a.cumsum(1), 1),
    "ArgMax": (
        lambda a: F.argmax(a, -1, keepdims=True),
        lambda a: a.argmax(-1, keepdim=True).expand_as(a),
        1,
    ),
    "TopK": (lambda a: F.topk(a, 3, -1)[1], lambda a: a.topk(3, -1)[1], 1),
    "MatMul": (
        lambda a: F.matmul(a, F.transpose(a, [1, 0])),
        lambda a: (a[:, :, None] * a.T[None]).sum(1),
        1,
    ),
    "Concat": (lambda a, b: F.concat([a, b], 0), lambda a, b: torch.cat([a, b]), 2),
    "Slice": (lambda a: F.slice(a, 1, 3, axis=0), lambda a: a[1:3], 1),
    "Gather": (lambda a: F.gather(a, F.ints([1, 0]), 0), lambda a: a[[1, 0]], 1),
    "Pad": (
        lambda a: F.pad(a, [0, 1, 0, 1], value=number(40)),
        lambda a: torch.nn.functional.pad(a, (1, 1), value=40),
        1,
    ),
    "Trilu": (lambda a: F.trilu(a, upper=True), torch.triu, 1),
    "compared": (lambda a, b: F.cast(F.less_equal(a, b), INT), lambda a, b: (a <= b).long(), 2),
    "through floats": (
        lambda a: F.cast(F.floor(F.mul(F.cast(a, FLOAT), 0.37)), INT),
        lambda a: (a.float() * 0.37).floor().long(),
        1,
    ),
    "Shape": (lambda a: F.shape(a), lambda a: torch.tensor(a.shape), 1),
    "int32": (lambda a: F.cast(F.cast(a, torch.int32), INT), lambda a: a.int().long(), 1),
    "uint8": (lambda a: F.cast(F.cast(a, torch.uint8), INT), lambda a: a.to(torch.uint8).long(), 1),
}
nn = torch.nn.functional
WEIGHT = torch.linspace(-2, 3, 9).reshape(3, 3)
FLOAT_STEPS: dict[str, Step] = {
    "Add": (F.add, torch.add, 2),
    "Sub": (F.sub, torch.sub, 2),
    "Mul": (F.mul, torch.mul, 2),
    "square": (lambda a: F.mul(a, a), lambda a: a * a, 1),
    "Div": (F.div, torch.div, 2),
    "Max": (F.maximum, torch.maximum, 2),
    "Min": (F.minimum, torch.minimum, 2),
    "Relu": (F.relu, torch.relu, 1),
    "Exp": (F.exp, torch.exp, 1),
    "Log": (F.log, torch.log, 1),
    "Sqrt": (F.sqrt, torch.sqrt, 1),
    "Reciprocal": (F.reciprocal, torch.reciprocal, 1),
    "Sigmoid": (F.sigmoid, torch.sigmoid, 1),
    "Tanh": (F.tanh, torch.tanh, 1),
    "Sin": (F.sin, torch.sin, 1),
    "Floor": (F.floor, torch.floor, 1),
    "Round": (F.round, torch.round, 1),
    "Gelu": (F.gelu, nn.gelu, 1),
    "Elu": (F.elu, nn.elu, 1),
    "LeakyRelu": (F.leaky_relu, nn.leaky_relu, 1),
    "HardSwish": (F.hardswish, nn.hardswish, 1),
    "Softplus": (F.softplus, nn.softplus, 1),
    "Clip": (lambda a: F.clip(a, -1.5, 2.0), lambda a: a.clamp(-1.5, 2.0), 1),
    "Pow": (lambda a: F.pow(a, 3.0), lambda a: a**3.0, 1),
    "root": (lambda a: F.pow(F.abs(a), 0.5), lambda a: a.abs() ** 0.5, 1),
    "over root": (lambda a: F.pow(F.abs(a), -0.5), lambda a: a.abs() ** -0.5, 1),
    "Softmax": (F.softmax, lambda a: a.softmax(-1), 1),
    "LogSoftmax": (F.log_softmax, lambda a: a.log_softmax(-1), 1),
    "ReduceSum": (lambda a: F.reduce_sum(a, [-1]), lambda a: a.sum(-1, True).expand_as(a), 1),
    "ReduceMean": (lambda a: F.reduce_mean(a, [-1]), lambda a: a.mean(-1, True).expand_as(a), 1),
    "ReduceL2": (lambda a: F.reduce_l2(a, [-1]), lambda a: a.norm(dim=-1, keepdim=True).expand_as(a), 1),
    "CumSum": (lambda a: F.cumsum(a, 1), lambda a: a.cumsum(1), 1),
    "MatMul": (F.matmul, torch.matmul, 2),
    "by a weight": (lambda a: F.matmul(a, F.constant(WEIGHT)), lambda a: a @ WEIGHT, 1),
    "LayerNormalization": (
        lambda a: F.layer_norm(a, torch.full((3,), 2.0), torch.ones(3), axis=-1, epsilon=1e-5),
        lambda a: nn.layer_norm(a, (3,), torch.full((3,), 2.0), torch.ones(3)),
        1,
    ),
    "root mean square": (
        lambda a: F.mul(a, F.reciprocal(F.sqrt(F.add(F.reduce_mean(F.mul(a, a), [-1]), 1e-6)))),
        lambda a: a * (1 / ((a * a).mean(-1, True) + 1e-6).sqrt()),
        1,
    ),
    "without NaN": (
        lambda a: F.where(F.isnan(a), 0.5, a),
        lambda a: torch.where(a.isnan(), 0.5, a),
        1,
    ),
    "masked": (
        lambda a: F.where(F.less(a, 0.0), -math.inf, a),
        lambda a: torch.where(a < 0, -math.inf, a),
        1,
    ),
    "half": (
        lambda a: F.cast(F.cast(a, torch.float16), FLOAT),
        lambda a: a.half().float(),
        1,
    ),
}
SQUARE = (3, 3)


def network_ranges(net: Network, inputs: dict[str, Interval]) -> dict[Any, Interval]:
    """The interval of every tensor, by its value."""
    known = {tensor.value: inputs[tensor.name] for tensor in net.get_inputs()}
    for layer in net.get_layers():
        operands = [
            None if t is None or is_weight(layer, t) else range_of(t, known) for t in layer.get_inputs()
        ]
        known.update(zip((t.value for t in layer.get_outputs()), layer_ranges(layer, operands), strict=True))
    return known


def run(steps: dict[str, Step], plan: list[tuple[str, int, int]], start: list[torch.Tensor]) -> None:
    """Build the network and compute the same in torch; every value lies in its interval."""
    net, values, tensors = Network(), list(start), []
    with net_guard(net):
        tensors = [Tensor(f"x{i}", x.dtype, SQUARE) for i, x in enumerate(start)]
        for name, first, second in plan:
            layer, reference, operands = steps[name]
            at = [first % len(values), second % len(values)][:operands]
            made, value = layer(*(tensors[i] for i in at)), reference(*(values[i] for i in at))
            check_later.append((made, value))
            if value.shape == SQUARE and made.shape == SQUARE:
                tensors.append(made)
                values.append(value)
        tensors[-1].mark_output("y")
    given_ranges = {
        f"x{i}": Interval(x.min().item(), x.max().item()) if not x.isnan().any() else whole(tensors[i].dtype)
        for i, x in enumerate(start)
    }
    known = network_ranges(net, given_ranges)
    for made, value in check_later:
        interval = known[made.value]
        numbers = value[~value.isnan()]
        assert interval.nan or numbers.numel() == value.numel(), (plan, made, interval)
        if numbers.numel():
            low, high = numbers.min().item(), numbers.max().item()
            assert interval.low <= low and high <= interval.high, (plan, made, interval, low, high)


check_later: list[tuple[Tensor, torch.Tensor]] = []
plans: Any = st.lists(
    st.tuples(st.sampled_from(sorted(INTEGER_STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)
float_plans: Any = st.lists(
    st.tuples(st.sampled_from(sorted(FLOAT_STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)
integers: Any = st.lists(st.one_of(st.integers(-9, 9), st.integers(-(2**20), 2**20)), min_size=9, max_size=9)
EXTREMES = [0.0, 1e-30, 1e10, -1e10, 1e30, 3e38, -3e38, math.inf, -math.inf, math.nan]
floats: Any = st.lists(
    st.one_of(st.floats(-4, 4, width=32), st.sampled_from(EXTREMES)), min_size=9, max_size=9
)


@given(plan=plans, a=integers, b=integers)
@settings(max_examples=200, deadline=None)
def test_integers(plan: list[tuple[str, int, int]], a: list[int], b: list[int]) -> None:
    check_later.clear()
    run(INTEGER_STEPS, plan, [torch.tensor(x).reshape(SQUARE) for x in (a, b)])


@given(plan=float_plans, a=floats, b=floats)
@settings(max_examples=200, deadline=None)
def test_floats(plan: list[tuple[str, int, int]], a: list[float], b: list[float]) -> None:
    check_later.clear()
    run(FLOAT_STEPS, plan, [torch.tensor(x, dtype=FLOAT).reshape(SQUARE) for x in (a, b)])


def only(body: Callable[..., Tensor], *inputs: tuple[torch.dtype, tuple[Any, ...], Interval]) -> Interval:
    net = Network()
    with net_guard(net):
        body(*(Tensor(f"x{i}", dtype, shape) for i, (dtype, shape, _) in enumerate(inputs))).mark_output("y")
    known = network_ranges(net, {f"x{i}": interval for i, (*_, interval) in enumerate(inputs)})
    return known[net.get_outputs()[0].value]


def test_what_a_layer_is_known_to_bound() -> None:
    calm = (FLOAT, (2, 16), Interval(-1e6, 1e6))
    positive = only(lambda x: F.relu(x), calm)
    assert (positive.low, positive.high) == (0, pytest.approx(1e6, rel=1e-5))
    assert (
        only(lambda x: F.layer_norm(x, torch.ones(16), torch.zeros(16), axis=-1, epsilon=1e-5), calm).high < 6
    )
    assert not only(lambda x: F.matmul(x, F.constant(torch.ones(16, 4))), calm).nan
    assert only(lambda x: F.matmul(x, F.constant(torch.full((16, 4), math.nan))), calm).nan
    image = (FLOAT, (1, 2, 8, 8), Interval(0, 255))
    weight = torch.full((4, 2, 3, 3), 0.5)
    sums = only(lambda x: F.conv(x, weight, None, strides=[1, 1], pads=[0] * 4, dilations=[1, 1]), image)
    assert sums.high == pytest.approx(255 * 9, rel=0.02)


def test_masks_of_lowest_numbers_do_not_overflow() -> None:
    lowest = torch.finfo(FLOAT).min
    scores = only(lambda x: F.add(x, lowest), (FLOAT, (2, 2), Interval(-1e6, 1e6)))
    assert scores.low == lowest and not scores.nan
    assert only(lambda x: F.add(F.add(x, lowest), lowest), (FLOAT, (2, 2), Interval(-1, 1))).low == -math.inf


def test_counts_and_sizes() -> None:
    mask = (torch.bool, (2, 7), Interval(0, 1))
    assert only(lambda m: F.reduce_sum(F.cast(m, INT), [1]), mask) == Interval(0, 7)
    assert only(lambda m: F.cumsum(F.cast(m, INT), 1), mask) == Interval(0, 7)
    assert only(lambda m: F.nonzero(m), mask) == Interval(0, 6)
    assert only(lambda m: F.size(m, 1), (torch.bool, (2, "n"), Interval(0, 1))).high == 2**31 - 1
    assert only(lambda m: F.shape(m), mask) == Interval(0, 7)


def test_unknown_layers_may_make_anything() -> None:
    body = lambda x: F.opaque("nobody.knows", "Mystery", x, makes=[(INT, (2,))])[0]  # noqa: E731
    assert only(body, (FLOAT, (2,), Interval(0, 1))) == Interval(-(2**63), 2**63 - 1)


def test_constants() -> None:
    table = F.constant
    assert only(lambda i: F.gather(table(np.array([3, -8, 5])), i), (INT, (4,), Interval(0, 2))) == Interval(
        -8, 5
    )
    assert only(
        lambda x: F.where(F.less(x, 0.0), table(torch.tensor(math.nan)), x), (FLOAT, (2,), Interval(0, 1))
    ).nan
