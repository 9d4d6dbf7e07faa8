"""The worklist leaves no match behind: what it skips could not match, and what changed is looked at again."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import FUSIONS, PatternRewriter, RewritePatternManager, Rule, refuse, rule

UNARY = [F.relu, F.neg, F.identity, F.exp, lambda x: F.cast(x, ir.DataType.FLOAT), F.sigmoid]
BINARY = [F.add, F.mul, F.sub, F.maximum]


def _rules() -> list[Rule]:
    patterns: list[Any] = [
        lambda op, a, b: op.Relu(op.Add(a, b)),
        lambda op, a, b, c: op.Sub(op.Mul(a, b), op.Neg(c)),
        lambda op, a: op.Sub(op.Relu(a), op.Neg(a)),
        lambda op, a: op.Relu(op.Relu(op.Relu(a))),
        lambda op, a, b: op.Sub(op.Relu(a, _shared=True), b),
        lambda op, a: op.Sub(a, 1.0),
        lambda op, a, c: op.Sub(op.Exp(a), op.constant(c)),
        lambda op, a, b: op.Neg(op.Sub(a, b, _name="inner")),
        lambda op, a: op.Softmax(op.Neg(a), axis=-1),
        lambda op, a: op.Relu(op.Softmax(a)),
    ]

    def one(net: Network, a: Tensor) -> Tensor:
        return a

    def named(net: Network, a: Tensor, inner: Layer) -> Tensor:
        return a

    return [
        rule(pattern, name=f"pattern {number}")(named if number == 7 else one)
        for number, pattern in enumerate(patterns)
    ]


RULES = _rules()


def _network(steps: list[tuple[int, int, int]], outputs: list[int]) -> Network:
    """Each step is an operation and which of the tensors made so far it reads; late ones are read most."""
    net = Network()
    with net_guard(net):
        made = [Tensor(name, torch.float32, (2, 3)) for name in "xy"]
        for kind, first, second in steps:
            a, b = made[-1 - first % min(4, len(made))], made[-1 - second % min(6, len(made))]
            if kind < 6:
                made.append(UNARY[kind](a))
            elif kind < 10:
                made.append(BINARY[kind - 6](a, b))
            elif kind == 10:
                made.append(F.sub(a, 1.0))
            elif kind == 11:
                made.append(F.softmax(a, axis=1))
            else:
                made.append(F.softmax(a, axis=0))
        for number in sorted({len(made) - 1, *(n % len(made) for n in outputs)}):
            if made[number].get_parent() is not None and not made[number].is_output():
                made[number].mark_output()
    return net


networks = st.builds(
    _network,
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=14),
    st.lists(st.integers(0, 20), max_size=2),
)


@pytest.mark.parametrize("asked", RULES, ids=lambda asked: asked.name)
@settings(max_examples=40, deadline=None)
@given(net=networks)
def test_what_feeds_a_root_never_hides_a_match(asked: Rule, net: Network) -> None:
    for layer in net.get_layers():
        if layer.kind in (asked.root_layer or ()) and asked.find(layer) is not None:
            fed = {maker.op_type for maker in layer.node.predecessors()}
            assert all(group & fed for group in asked.fed_by[layer.kind]), f"{net}\n{layer}"


@rule(lambda op, a: op.Relu(op.Relu(a)))
def relu_once(net: Network, a: Tensor) -> Tensor:
    return F.relu(a)


@rule(lambda op, a, b: op.Relu(op.Add(a, b)))
def fused(net: Network, a: Tensor, b: Tensor) -> Tensor:
    return F.maximum(a, b)


@rule(lambda op, a: op.Exp(op.Neg(op.Max(a, a))))
def short_cut(net: Network, a: Tensor) -> Tensor:
    return F.sigmoid(a)


@rule(lambda op, a: op.Neg(op.Neg(op.Identity(a))))
def twice(net: Network, a: Tensor) -> Tensor:
    return a


@rule(lambda op, a, b: op.Sub(op.Mul(a, b), op.Mul(a, b)))
def nothing(net: Network, a: Tensor, b: Tensor) -> Tensor:
    return F.sub(a, a)


@settings(max_examples=150, deadline=None)
@given(net=networks, benefits=st.permutations(range(7)), equal=st.booleans())
def test_nothing_matches_when_the_worklist_is_empty(net: Network, benefits: list[int], equal: bool) -> None:
    manager = RewritePatternManager()
    shipped = [FUSIONS[name].pattern for name in ("identity", "common_subexpression")]
    for pattern, benefit in zip(
        [relu_once, fused, short_cut, twice, nothing, *shipped], benefits, strict=True
    ):
        manager.add(pattern.name, pattern, 0 if equal else benefit)
    before = str(net)
    manager.rewrite(net)
    net.verify()
    assert manager.matches(net) == [], f"{before}\n{net}"


def test_a_refusal_that_rests_on_what_is_far_away_is_asked_again() -> None:
    @rule(lambda op, a: op.Sigmoid(a))
    def far(net: Network, a: Tensor) -> object:
        return F.tanh(a) if net.get_layer_by_name("exp") is None else refuse("there is an exp")

    @rule(lambda op, a: op.Relu(op.Exp(a)))
    def without(net: Network, a: Tensor) -> Tensor:
        return F.relu(a)

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
        F.sigmoid(x).mark_output("y")
        F.relu(F.exp(x)).mark_output("z")
    manager = RewritePatternManager()
    manager.add("far", far, benefit=2)
    manager.add("without", without, benefit=1)
    assert manager.rewrite(net).counts() == {"without": 1, "far": 1}


def test_layers_that_nothing_changed_around_are_asked_once() -> None:
    asked: list[str] = []

    class Counting(PatternRewriter):
        reach = 1

        def match_and_rewrite(self, layer: Layer) -> bool:
            asked.append(layer.name)
            return False

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
        for _ in range(40):
            x = F.neg(F.exp(x))
        F.relu(F.relu(x)).mark_output("y")
    manager = RewritePatternManager()
    manager.add("counting", Counting("counting", {"Exp"}), benefit=1)
    manager.add("relu_once", relu_once)
    assert len(manager.rewrite(net)) == 1
    assert sorted(asked) == sorted(layer.name for layer in net.get_layers() if layer.kind == "Exp")


def test_inputs_left_out_at_the_end_are_as_if_not_written() -> None:
    @rule(lambda op, x: op.Clip(x))
    def unbounded(net: Network, x: Tensor) -> Tensor:
        return x

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
    for inputs in ([x.value], [x.value, None, None]):
        found = unbounded.find(Layer(ir.Node("", "Clip", inputs)))
        assert found is not None and found.variables == {"x": x.value}
