"""check_pattern lets right rules pass and catches wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor, dtypes, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import PatternRewriter, check_pattern, refuse, rule


def test_a_right_rule_passes() -> None:
    @rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
    def linear(net: Network, x: Tensor, w: Tensor, b: Tensor) -> object:
        if x.ndim != 2 or w.ndim != 2 or b.ndim != 1:
            return refuse(f"ranks {x.ndim}, {w.ndim}, {b.ndim}")
        if b.shape[0] not in (1, w.shape[1]) or (b.shape[0] != w.shape[1] and w.shape[1] == 1):
            return refuse(f"the bias {b.shape} widens the product")
        return F.gemm(x, w, b)

    checked = check_pattern(linear, trials=12)
    assert checked.fired >= 5 and checked.worst < 1e-5
    assert sum(checked.refused.values()) == checked.tried - checked.fired


def test_any_permutation_of_k_is_caught() -> None:
    """Where all sizes are equal, shapes say nothing: only numbers do."""

    @rule(lambda op, q, k, v: op.MatMul(op.Softmax(op.MatMul(q, op.Transpose(k, perm=op.any))), v))
    def attention(net: Network, q: Tensor, k: Tensor, v: Tensor) -> object:
        if (
            not all(t.ndim == 4 for t in (q, k, v))
            or k.shape[:2] != q.shape[:2]
            or v.shape[:3] != k.shape[:3]
        ):
            return refuse("not four dimensions")
        if k.shape[3] != q.shape[3]:
            return refuse("widths differ")
        return F.attention(q, k, v, scale=1.0)

    with pytest.raises(RewriteError, match="pattern 'attention' changes output 0"):
        check_pattern(attention, trials=200)


def test_wrong_numbers_are_caught_and_shown() -> None:
    @rule(lambda op, x: op.Mul(x, op.Sigmoid(x)))
    def wrong(net: Network, x: Tensor) -> Tensor:
        return F.relu(x)

    with pytest.raises(RewriteError, match=r"(?s)changes output 0 by .*before:.*Sigmoid.*after:.*Relu"):
        check_pattern(wrong)


def test_a_rule_that_never_fires_proves_nothing() -> None:
    @rule(lambda op, x: op.Relu(x))
    def shy(net: Network, x: Tensor) -> object:
        return refuse("not today")

    with pytest.raises(RewriteError, match=r"never fired in 200 networks: not today \(200 times\)"):
        check_pattern(shy, trials=5)


class AddToSub(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("add_to_sub", {"Add"}, separate_match_rewrite=True)

    def match(self, layer: Layer) -> bool:
        return True

    def rewrite(self, layer: Layer) -> None:
        a, b = layer.get_inputs(0, 1)
        layer.get_outputs(0)[0].replace_all_uses_with(a - b)  # type: ignore[operator]
        layer.mark_as_removed()


def sums(rng: np.random.Generator) -> Network:
    net = Network()
    with net_guard(net):
        (Tensor("a", torch.float32, (2, "n")) + Tensor("b", torch.float32, (2, "n"))).mark_output("y")
    return net


def test_class_patterns_are_checked_on_given_networks() -> None:
    with pytest.raises(RewriteError, match="is not a rule: give sample="):
        check_pattern(AddToSub())
    with pytest.raises(RewriteError, match="pattern 'add_to_sub' changes output 0"):
        check_pattern(AddToSub(), sums, trials=3)


@rule(lambda op, x, y: op.Add(x, y))
def wrong_on_integers(net: Network, x: Tensor, y: Tensor) -> object:
    return F.sub(x, y) if x.dtype in dtypes.INTEGERS else refuse("floats")


@rule(lambda op, x, y: op.Mul(op.Div(x, y), y))
def wrong_division(net: Network, x: Tensor, y: Tensor) -> object:
    """True of numbers, up to rounding, not of integers: 3 / 2 * 2 is 2."""
    if x.shape != y.shape:
        return refuse("sizes differ")
    return F.identity(x)


@rule(lambda op, x: op.Log(op.Exp(x)))
def wrong_when_large(net: Network, x: Tensor) -> object:
    return F.identity(x)


@rule(lambda op, x: op.Sub(x, x))
def wrong_at_infinity(net: Network, x: Tensor) -> object:
    return F.sign(x) * 0.0 if x.dtype in dtypes.FLOATS else refuse("integers")


@rule(lambda op, x: op.Relu(x))
def wrong_at_nan(net: Network, x: Tensor) -> object:
    if x.dtype not in dtypes.FLOATS:
        return refuse("integers have no NaN")
    return F.where(F.greater(x, F.constant(0.0, x.dtype)), x, F.constant(0.0, x.dtype))


@rule(lambda op, x, y: op.Add(x, y))
def wrong_with_symbols(net: Network, x: Tensor, y: Tensor) -> object:
    return refuse("sizes are known") if all(isinstance(d, int) for d in x.shape) else F.sub(x, y)


@rule(lambda op, x: op.Reciprocal(op.Neg(op.Neg(x))))
def right_everywhere(net: Network, x: Tensor) -> object:
    return F.reciprocal(x)


@rule(lambda op, x: op.Reciprocal(op.Abs(x)))
def wrong_at_negative_zero(net: Network, x: Tensor) -> object:
    """Right wherever x has another sign than its zero: 1 / -0.0 is -inf, 1 / |-0.0| is inf."""
    positive = F.where(F.less(x, F.constant(0.0, x.dtype)), F.neg(x), x)
    return F.reciprocal(positive)


@pytest.mark.parametrize(
    "pattern",
    [
        wrong_on_integers,
        wrong_division,
        wrong_when_large,
        wrong_at_infinity,
        wrong_at_nan,
        wrong_with_symbols,
        wrong_at_negative_zero,
    ],
    ids=lambda pattern: pattern.name,
)
def test_rules_that_are_wrong_only_there(pattern: PatternRewriter) -> None:
    with pytest.raises(RewriteError, match=f"pattern '{pattern.name}' changes output 0"):
        check_pattern(pattern)


def test_kinds_of_values_can_be_chosen() -> None:
    assert check_pattern(wrong_at_negative_zero, kinds=["plain", "large"]).fired == 40
    assert check_pattern(right_everywhere).fired == 40
