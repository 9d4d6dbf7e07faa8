"""A plain pattern made into a function finds what the matcher finds, in any network."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import Rule, rule
from intarsia.rewrite.found import Found

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


def _shown(found: Any, asked: Rule) -> list[object] | None:
    """What the rule's function would be given, as raw nodes and values."""
    if found is None:
        return None
    given = found if type(found) is tuple else asked._bindings(found).values()
    return [item.node if isinstance(item, Layer) else item.value for item in given]


@pytest.mark.parametrize("asked", RULES, ids=lambda asked: asked.name)
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=14
    ),
    outputs=st.lists(st.integers(0, 20), max_size=2),
)
def test_the_function_agrees_with_the_matcher(
    asked: Rule, steps: list[tuple[int, int, int]], outputs: list[int]
) -> None:
    net = _network(steps, outputs)
    for node in net.graph:
        if node.op_type in (asked.root_layer or ()):
            assert _shown(asked.find_at(node), asked) == _shown(asked._first(node), asked), f"{net}\n{node}"


def test_all_of_these_patterns_have_a_function() -> None:
    net = _network([(0, 0, 0)], [])
    plain = [asked.name for asked in RULES if asked.find_at == asked._first]
    assert not plain, f"{plain} are left to the matcher alone"
    assert isinstance(RULES[3]._first(net.graph[0]), Found | None)


def test_choices_are_left_to_the_matcher() -> None:
    @rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
    def linear(net: Network, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gemm(x, w, b)

    assert linear.find_at == linear._first


def test_inputs_left_out_at_the_end_are_as_if_not_written() -> None:
    @rule(lambda op, x: op.Clip(x))
    def unbounded(net: Network, x: Tensor) -> Tensor:
        return x

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
    for inputs in ([x.value], [x.value, None, None]):
        node = ir.Node("", "Clip", inputs)
        assert _shown(unbounded.find_at(node), unbounded) == [x.value]
        assert _shown(unbounded._first(node), unbounded) == [x.value]
