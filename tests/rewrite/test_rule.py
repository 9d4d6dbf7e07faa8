"""The short form: what a pattern matches, what it refuses, and what it says then."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from intarsia.errors import RewriteError
from intarsia.network import (
    FLayerInfoMemo,
    Layer,
    Network,
    Tensor,
    infers,
    net_guard,
    record_signature,
)
from intarsia.network import functional as F
from intarsia.rewrite import (
    FUSIONS,
    AnalysisPatternManager,
    PatternAnalyzer,
    PatternRewriter,
    RewritePatternManager,
    Rule,
    refuse,
    rule,
)


def network(make: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: tuple[int | str, ...]) -> Network:
    net = Network()
    with net_guard(net):
        inputs = [Tensor("xyz"[i], torch.float32, shape) for i, shape in enumerate(shapes)]
        made = make(*inputs)
        for tensor in made if isinstance(made, tuple) else (made,):
            tensor.mark_output()
    return net


def apply(pattern: Rule, net: Network) -> int:
    manager = RewritePatternManager()
    manager.add(pattern.name, pattern)
    fired = len(manager.rewrite(net))
    net.verify()
    return fired


def why(pattern: Rule, net: Network, name: str) -> str:
    manager = RewritePatternManager()
    manager.add(pattern.name, pattern)
    layer = net.get_layer_by_name(name)
    assert layer is not None
    return manager.explain(layer)[0].reason


@rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
def linear(net: Network, x: Tensor, w: Tensor, b: Tensor) -> object:
    if b.ndim != 1:
        return refuse(f"bias has {b.ndim} dimensions")
    return F.gemm(x, w, b)


def test_linear_either_way_round() -> None:
    for swap in (False, True):
        net = network(
            lambda x, w, b, swap=swap: b + F.matmul(x, w) if swap else F.matmul(x, w) + b,
            (2, 3),
            (3, 4),
            (4,),
        )
        assert apply(linear, net) == 1
        assert str(net).endswith("gemm = Gemm(x, y, z)") or "= Gemm(x, y, z)" in str(net)
        assert len(net) == 1


def test_a_refusal_keeps_the_network_and_says_why() -> None:
    net = network(lambda x, w, b: F.matmul(x, w) + b, (2, 3), (3, 4), (1, 4))
    before = str(net)
    assert apply(linear, net) == 0
    assert str(net) == before
    assert why(linear, net, "add") == "bias has 2 dimensions"
    assert why(linear, net, "matmul") == "it starts at Add; matmul is MatMul"


def test_the_other_way_round_is_tried_when_the_first_is_refused() -> None:
    @rule(lambda op, a, b: op.Mul(a, b))
    def halve(net: Network, a: Tensor, b: Tensor) -> object:
        if b.constant is None:
            return refuse(f"{b.name} is not constant")
        return F.div(a, 1 / float(b.constant))

    assert apply(halve, network(lambda x: F.mul(0.5, x), (3,))) == 1


def test_interior_values_must_not_be_read_elsewhere() -> None:
    @rule(lambda op, x: op.Relu(op.Neg(x)))
    def fold(net: Network, x: Tensor) -> Tensor:
        return F.abs(x)

    net = network(lambda x: (F.relu(F.neg(x)), F.exp(x)), (3,))
    assert apply(fold, net) == 1
    shared = network(lambda x: (lambda n: (F.relu(n), F.exp(n)))(F.neg(x)), (3,))
    assert apply(fold, shared) == 0
    assert why(fold, shared, "relu") == "neg is also read by exp"
    shown = network(lambda x: (lambda n: (F.relu(n), n))(F.neg(x)), (3,))
    assert why(fold, shown, "relu") == "neg is an output of the network"


def test_a_shared_interior_value_may_be_allowed() -> None:
    @rule(lambda op, x: op.Relu(op.Neg(x, _shared=True)))
    def fold(net: Network, x: Tensor) -> Tensor:
        return F.abs(x)

    net = network(lambda x: (lambda n: (F.relu(n), F.exp(n)))(F.neg(x)), (3,))
    assert apply(fold, net) == 1
    assert [layer.kind for layer in net.get_layers()] == ["Neg", "Abs", "Exp"]


def test_layers_that_change_nothing_are_seen_through() -> None:
    @rule(lambda op, x: op.Relu(op.Neg(x)))
    def fold(net: Network, x: Tensor) -> Tensor:
        return F.abs(x)

    def noisy(x: Tensor) -> Tensor:
        y = F.identity(F.neg(x))
        y = F.reshape(F.transpose(y, (0, 1)), (2, 3))
        return F.relu(F.op("Cast", y, to=1))

    net = network(noisy, (2, 3))
    assert apply(fold, net) == 1 and len(net) == 1
    moved = network(lambda x: F.relu(F.transpose(F.neg(x), (1, 0))), (2, 2))
    assert apply(fold, moved) == 0
    assert why(fold, moved, "relu") == "transpose is made by Transpose, not Neg"


def test_attributes_not_mentioned_must_hold_their_default() -> None:
    @rule(lambda op, x: op.Exp(op.Softmax(x)))
    def last(net: Network, x: Tensor) -> Tensor:
        return F.relu(x)

    assert apply(last, network(lambda x: F.exp(F.softmax(x, -1)), (2, 3))) == 1
    assert apply(last, network(lambda x: F.exp(F.softmax(x, 1)), (2, 3))) == 1
    other = network(lambda x: F.exp(F.softmax(x, 0)), (2, 3))
    assert apply(last, other) == 0
    assert why(last, other, "exp") == "softmax has axis=0, which the pattern does not mention"


def test_attributes_by_value_by_function_and_any() -> None:
    @rule(lambda op, x: op.Transpose(op.Transpose(x, perm=op.any, _name="inner"), perm=lambda p: p[0] == 0))
    def twice(net: Network, x: Tensor, inner: object) -> object:
        return refuse(f"inner order {inner.attribute('perm')}")  # type: ignore[attr-defined]

    net = network(lambda x: F.transpose(F.transpose(x, (2, 1, 0)), (0, 2, 1)), (2, 2, 2))
    assert why(twice, net, "transpose_1") == "inner order [2, 1, 0]"
    net = network(lambda x: F.transpose(F.transpose(x, (2, 1, 0)), (1, 2, 0)), (2, 2, 2))
    assert why(twice, net, "transpose_1") == "perm of transpose_1 is [1, 2, 0], not what it should be"


def test_numbers_match_constants_exactly() -> None:
    @rule(lambda op, x: op.Div(x, 1.4142135623730951))
    def by_root_two(net: Network, x: Tensor) -> Tensor:
        return F.neg(x)

    assert apply(by_root_two, network(lambda x: x / np.full(3, 2**0.5, np.float32), (3,))) == 0
    assert apply(by_root_two, network(lambda x: x / np.float32(2**0.5), (3,))) == 1
    assert apply(by_root_two, network(lambda x: x / float(2**0.5), (3,))) == 1
    off = network(lambda x: x / 1.4143, (3,))
    assert apply(by_root_two, off) == 0
    assert "is not the constant 1.41421" in why(by_root_two, off, "div")


def test_a_variable_written_twice_is_one_tensor() -> None:
    @rule(lambda op, x: op.Mul(x, op.Sigmoid(x)))
    def swish(net: Network, x: Tensor) -> Tensor:
        return F.relu(x)

    assert apply(swish, network(lambda x: F.sigmoid(x) * x, (3,))) == 1
    mixed = network(lambda x, y: F.sigmoid(x) * y, (3,), (3,))
    assert apply(swish, mixed) == 0
    assert why(swish, mixed, "mul") == "x is both y and x"


def test_optional_inputs_and_alternatives() -> None:
    seen: list[tuple[bool, bool]] = []

    @rule(
        lambda op, x, low, high, k: op.Clip(
            op.either(op.Mul(x, op.constant(k)), x), op.maybe(low), op.maybe(high)
        )
    )
    def clipped(net: Network, x: Tensor, low: Tensor | None, high: Tensor | None, k: Tensor | None) -> Tensor:
        seen.append((high is None, k is None))
        return F.relu(x)

    assert apply(clipped, network(lambda x: F.clip(x * 2.0, 0.0), (3,))) == 1
    assert apply(clipped, network(lambda x: F.clip(x, 0.0, 1.0), (3,))) == 1
    assert apply(clipped, network(lambda x: F.clip(x, None, 1.0), (3,))) == 1
    assert seen == [(True, False), (False, True), (False, True)]


def test_several_outputs() -> None:
    def pair(op: object, x: object, v: object, w: object) -> object:
        return op.MatMul(x, op.constant(v)), op.MatMul(x, op.constant(w))  # type: ignore[attr-defined]

    @rule(pair)
    def merge(net: Network, x: Tensor, v: Tensor, w: Tensor) -> object:
        assert v.constant is not None and w.constant is not None
        if v.constant.shape != w.constant.shape:
            return refuse("weights differ in shape")
        both = F.constant(np.concatenate([v.constant, w.constant], axis=1))
        size = v.constant.shape[1]
        return F.split(F.matmul(x, both), (size, size), axis=1)

    one, two = (np.ones((3, 4), np.float32) * i for i in (1, 2))
    net = network(lambda x: (F.matmul(x, F.constant(one)), F.relu(F.matmul(x, F.constant(two)))), (2, 3))
    assert apply(merge, net) == 1
    assert [layer.kind for layer in net.get_layers()] == ["MatMul", "Split", "Relu"]
    alone = network(lambda x: F.matmul(x, F.constant(one)), (2, 3))
    assert why(merge, alone, "matmul") == "there is no further MatMul for the pattern"


def test_one_of_several_outputs_of_a_layer() -> None:
    @rule(lambda op, x: op.Relu(op.Split(x, axis=0, _any_inputs=True)[1]))
    def never(net: Network, x: Tensor) -> Tensor:
        return F.neg(x)

    net = network(lambda x: F.relu(F.split(x, (1, 1), 0)[0]), (2, 3))
    assert why(never, net, "relu") == "split is output 0 of split, not 1"


def test_mistakes_in_a_rule_are_told_when_it_is_made() -> None:
    with pytest.raises(RewriteError, match=r"asks for \['y'\]; its pattern has \['x'\]"):
        rule(lambda op, x: op.Relu(x))(lambda net, y: y)
    with pytest.raises(RewriteError, match="a pattern is the result of an operator"):
        rule(lambda op, x: x)(lambda net, x: x)
    with pytest.raises(RewriteError, match="has no option"):
        rule(lambda op, x: op.Relu(x, _shred=True))(lambda net, x: x)
    with pytest.raises(RewriteError, match="cannot be part of a pattern"):
        rule(lambda op, x: op.Relu("x"))(lambda net, x: x)


# What docs/rewriting.md shows is what happens.


PAGE = Path(__file__).parents[2] / "docs" / "rewriting.md"


def test_the_page_runs() -> None:
    failed, tried = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried > 30 and failed == 0


def test_every_shipped_pattern_is_listed() -> None:
    text = PAGE.read_text()
    assert [name for name in FUSIONS if f"`{name}`" not in text] == []


# The two worked examples of classical graph rewriting, as they stand in the documentation.


class ReplaceAddWithSub(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("replace_add_with_sub", root_layer={"Add"}, separate_match_rewrite=True)

    def match(self, layer: Layer) -> bool:
        return layer.as_layer().op_type == "Add"

    def rewrite(self, layer: Layer) -> None:
        with net_guard(layer.network):
            a, b = layer.get_inputs(0, 1)
            o = layer.get_outputs(0)[0]
            c = a - b
            o.replace_all_uses_with(c)
            layer.mark_as_removed()


def test_sum_becomes_subtract() -> None:
    net = Network()
    with net_guard(net):
        a, b = Tensor("a", torch.float32, (2, 3)), Tensor("b", torch.float32, (2, 3))
        (a + b).mark_output("y")
    old = net.get_layer_by_name("add")
    assert old is not None
    manager = RewritePatternManager()
    manager.add("add_to_sub", ReplaceAddWithSub())
    log = manager.rewrite(net)
    assert len(log) == 1
    assert old.is_removed() and old.get_outputs()[0].get_users() == []
    assert str(net) == "network(a: f32[2, 3], b: f32[2, 3]) -> (y: f32[2, 3])\n  y = Sub(a, b)"


@infers("GPTAttention", domain="plugins")
def _attention_shape(inputs: Sequence[Tensor | None], attributes: object, outputs: int) -> list[object]:
    qkv = inputs[0]
    assert qkv is not None
    return [(qkv.dtype, (*qkv.shape[:2], 8))]


@record_signature
def gpt_attention(qkv: Tensor, heads: int, *, remove_padding: bool = False) -> dict[str, Tensor]:
    made = F.op("GPTAttention", qkv, domain="plugins", heads=heads, remove_padding=remove_padding)
    return {"context": made}


class RemovePadding(PatternRewriter):
    def __init__(self) -> None:
        super().__init__("remove_padding", root_layer={"plugins::GPTAttention"}, keep_types=False)

    def match_and_rewrite(self, layer: Layer) -> bool:
        flayer = FLayerInfoMemo.instance().get(layer.name)
        assert flayer
        if flayer.get_input("qkv").shape[0] == 1:  # it has no padding already
            return False
        batch, length, hidden = (self.args[name] for name in ("batch_size", "in_len", "hidden_size"))
        with net_guard(layer.network):
            new_inputs = flayer.clone_inputs()
            new_inputs["qkv"] = Tensor("qkv", torch.float16, (1, batch * length, hidden))
            new_inputs["remove_padding"] = True
            flayer.replace_outputs_uses_with(layer.network, gpt_attention(**new_inputs))
            layer.mark_as_removed()
        return True


def test_attention_without_padding_ends_after_one_rewrite() -> None:
    net = Network()
    with net_guard(net):
        qkv = Tensor("qkv", torch.float16, (4, 16, 24))
        F.relu(gpt_attention(qkv, heads=2)["context"]).mark_output("y")
    manager = RewritePatternManager()
    manager.add("remove_padding", RemovePadding())
    log = manager.rewrite(net, args={"batch_size": 4, "in_len": 16, "hidden_size": 24})
    assert log.counts() == {"remove_padding": 1}
    assert str(net) == (
        "network(qkv: f16[4, 16, 24], qkv_1: f16[1, 64, 24]) -> (y: f16[1, 64, 8])\n"
        "  gptattention_1 = plugins::GPTAttention(qkv_1) {heads=2, remove_padding=1}\n"
        "  y = Relu(gptattention_1)"
    )


class CountAdds(PatternAnalyzer):
    def __init__(self) -> None:
        super().__init__("count_adds", root_layer={"Add"})
        self.asked: list[str] = []
        self.found: list[str] = []

    def match(self, layer: Layer) -> bool:
        self.asked.append(layer.name)
        return layer.get_inputs(0) != layer.get_inputs(1)

    def analyze(self, subgraph: list[Layer]) -> None:
        self.found += [layer.name for layer in subgraph]


def test_analysis_asks_about_each_layer_once() -> None:
    net = Network()
    with net_guard(net):
        a, b = Tensor("a", torch.float32, (2,)), Tensor("b", torch.float32, (2,))
        F.relu((a + b) + (a + a)).mark_output("y")
    pattern = CountAdds()
    manager = AnalysisPatternManager()
    manager.add("count", pattern)
    manager.analyze(net)
    assert pattern.asked == ["add", "add_1", "add_2"]
    assert pattern.found == ["add", "add_2"]
    assert manager.get("count") is pattern
