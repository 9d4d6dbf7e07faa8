"""One try of one pattern: what it is checked for, what it says it did, and that nothing is left of a no."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor, infers, net_guard
from intarsia.network import functional as F
from intarsia.network.edit.graph import Order
from intarsia.rewrite import PatternRewriter, RewritePatternManager, refuse, rule


class Acts(PatternRewriter):
    def __init__(self, kind: str, act: Callable[[Layer], object], *, keep_types: bool = True) -> None:
        super().__init__("acts", root_layer={kind}, keep_types=keep_types)
        self.act_on = act

    def match_and_rewrite(self, layer: Layer) -> bool:
        return self.act_on(layer)  # type: ignore[return-value]


def manager(pattern: PatternRewriter) -> RewritePatternManager:
    made = RewritePatternManager()
    made.add("acts", pattern)
    return made


def two_deep() -> tuple[Network, Tensor]:
    """relu(exp(x)), and an input nothing reads."""
    net = Network()
    with net_guard(net):
        x, z = Tensor("x", torch.float32, (2, 3)), Tensor("z", torch.float32, (2, 3))
        F.relu(F.exp(x)).mark_output("y")
    return net, z


def test_a_tensor_of_another_network_is_taken_back() -> None:
    net, _ = two_deep()
    _, foreign = two_deep()

    @rule(lambda op, x: op.Relu(x))
    def mixed(net: Network, x: Tensor) -> Tensor:
        return F.add(x, foreign)

    before = str(net)
    with pytest.raises(RewriteError, match=r"'mixed' at layer relu .* reads z, which is not of this network"):
        manager(mixed).rewrite(net)
    assert str(net) == before
    net.verify()


def test_operands_that_an_operator_does_not_take_are_taken_back() -> None:
    net, z = two_deep()
    before = str(net)

    @rule(lambda op, x: op.Relu(x))
    def mixed(net: Network, x: Tensor) -> Tensor:
        return F.add(x, F.cast(x, torch.int64))

    @rule(lambda op, x: op.Relu(x))
    def lone(net: Network, x: Tensor) -> Tensor:
        return F.op("Add", x)

    def by_hand(layer: Layer) -> bool:
        (read,), (old,) = layer.get_inputs(), layer.get_outputs()
        made = net.add_layer("Not", [read], outputs=[(old.dtype, old.shape)])
        old.replace_all_uses_with(made.get_outputs()[0])
        return True

    def redirected(layer: Layer) -> bool:
        layer.replace_input(0, F.cast(z, torch.bool))
        return True

    for pattern, said in (
        (mixed, r"B has inconsistent type tensor\(int64\)"),
        (lone, "Add of .* input size 1 not in range"),
        (Acts("Relu", by_hand), r"Not of .* has unsupported type: tensor\(float\)"),
        (Acts("Relu", redirected), r"Relu of .* has unsupported type: tensor\(bool\)"),
    ):
        with pytest.raises(RewriteError, match=f"at layer relu .* was undone: .*{said}"):
            manager(pattern).rewrite(net)
        assert str(net) == before
        net.verify()


def test_what_was_made_and_not_needed_is_not_in_the_log() -> None:
    net, _ = two_deep()

    @rule(lambda op, x: op.Relu(x))
    def wasteful(net: Network, x: Tensor) -> Tensor:
        F.abs(F.sin(x))
        Layer(F.cos(x).value.producer()).mark_as_removed()  # type: ignore[arg-type]
        return F.neg(x)

    log = manager(wasteful).rewrite(net)
    assert str(log) == "acts: relu -> neg"
    made = net.get_layer_by_name("neg")
    assert made is not None
    assert made.node.metadata_props == {"pattern": "acts", "replaced": "relu"}


def test_one_input_replaced() -> None:
    net, z = two_deep()

    def rewired(layer: Layer) -> object:
        if layer.get_inputs(0)[0] == z:
            return refuse("it reads z")
        layer.replace_input(0, z)
        return True

    assert str(manager(Acts("Relu", rewired)).rewrite(net)) == "acts: exp -> nothing"
    assert str(net).endswith("y: f32[2, 3])\n  y = Relu(z)")
    net.verify()


def test_one_input_replaced_by_another_type() -> None:
    net, _ = two_deep()
    with net_guard(net):
        wide = Tensor("wide", torch.float32, (5, 7))

    def rewired(layer: Layer) -> object:
        if layer.get_inputs(0)[0] == wide:
            return False
        layer.replace_input(0, wide)
        return True

    before = str(net)
    with pytest.raises(RewriteError, match=r"is FLOAT \[5, 7\] of what layer relu reads now"):
        manager(Acts("Relu", rewired)).rewrite(net)
    assert str(net) == before
    manager(Acts("Relu", rewired, keep_types=False)).rewrite(net)
    assert net.get_outputs()[0].shape == (5, 7)
    net.verify()


def test_a_changed_shape_goes_down_both_arms_before_they_meet() -> None:
    @infers("Packed", domain="test_transaction")
    def _(inputs, attributes, outputs):  # type: ignore[no-untyped-def]
        return [(inputs[0].dtype, inputs[0].shape)]

    net = Network()
    with net_guard(net):
        made = F.op("Packed", Tensor("x", torch.float32, (4, 16)), domain="test_transaction")
        ((made + F.relu(made)) * F.exp(F.neg(made))).mark_output("y")

    def packed(layer: Layer) -> object:
        if layer.get_inputs(0)[0].shape == (1, 64):  # type: ignore[union-attr]
            return False
        new = F.op("Packed", Tensor("packed", torch.float32, (1, 64)), domain="test_transaction")
        layer.get_outputs()[0].replace_all_uses_with(new)
        return True

    manager(Acts("test_transaction::Packed", packed, keep_types=False)).rewrite(net)
    assert {tensor.shape for layer in net.get_layers() for tensor in layer.get_outputs()} == {(1, 64)}
    net.verify()


@rule(lambda op, x: op.Exp(x))
def exp_to_abs(net: Network, x: Tensor) -> Tensor:
    return F.abs(F.mul(x, 3.5))


@pytest.mark.parametrize("ask", ["explain", "rewrite"])
@pytest.mark.parametrize("end", ["refuses", "raises", "acts"])
def test_a_pattern_that_lets_others_act(ask: str, end: str) -> None:
    net, _ = two_deep()
    with net_guard(net):
        F.mul(net.get_inputs()[1], 2.5).mark_output("other")
    others = manager(exp_to_abs)

    def act(layer: Layer) -> object:
        (read,) = layer.get_inputs()
        assert read is not None
        old, new = layer.get_outputs()[0], F.neg(read)
        if ask == "explain":
            assert others.explain(Layer(read.value.producer()))[0].reason == ""  # type: ignore[arg-type]
        else:
            assert len(others.rewrite(net)) == 1
        old.replace_all_uses_with(new)
        if end == "raises":
            raise ValueError("half-way")
        return refuse("no") if end == "refuses" else True

    before = str(net)
    acting = manager(Acts("Relu", act))
    if end == "raises":
        with pytest.raises(RewriteError, match="half-way"):
            acting.rewrite(net)
    else:
        acting.rewrite(net)
    net.verify()
    if end == "acts":
        kinds = sorted(layer.kind for layer in net.get_layers())
        assert kinds == (["Exp", "Mul", "Neg"] if ask == "explain" else ["Abs", "Mul", "Mul", "Neg"])
    else:
        assert str(net) == before


@pytest.mark.parametrize("strict", [True, False])
def test_a_match_that_fails_names_its_pattern(strict: bool) -> None:
    net, _ = two_deep()
    with net_guard(net):
        F.op("Transpose", net.get_inputs()[0]).mark_output("turned")

    @rule(lambda op, x: op.Transpose(x, perm=lambda order: order[0] == 0))
    def hasty(net: Network, x: Tensor) -> Tensor:
        return x

    told = "pattern 'hasty' could not be checked at layer transpose .Transpose.: .*Error: 'NoneType'"
    if strict:
        with pytest.raises(RewriteError, match=told):
            manager(hasty).rewrite(net)
    else:
        (broken,) = manager(hasty).rewrite(net, strict=False).broken
        assert "'hasty' could not be checked at layer transpose" in str(broken)
    turned = net.get_layer_by_name("transpose")
    assert turned is not None
    assert "could not be checked" in manager(hasty).explain(turned)[0].reason


def test_an_output_that_copies_an_input_stays() -> None:
    net = Network()
    with net_guard(net):
        copy = F.identity(Tensor("x", torch.float32, (2, 3)))
        F.neg(copy).mark_output("z")
        copy.mark_output("y")

    @rule(lambda op, x: op.Identity(x))
    def without(net: Network, x: Tensor) -> Tensor:
        return x

    assert str(manager(without).rewrite(net)) == "acts: nothing -> nothing"
    assert str(net).endswith("  y = Identity(x)\n  z = Neg(x)")
    net.verify()
    kept = net.get_layer_by_name("identity")
    assert kept is not None
    assert manager(without).explain(kept)[0].reason == "its replacement is there already"


def test_work_without_effect_is_an_error_and_not_a_loop() -> None:
    net, _ = two_deep()

    def idle(layer: Layer) -> object:
        F.sin(F.mul(layer.get_inputs()[0], 7.5))  # type: ignore[arg-type]
        return True

    before = str(net)
    with pytest.raises(RewriteError, match="it reports a rewrite, but it changed nothing"):
        manager(Acts("Relu", idle)).rewrite(net)
    assert str(net) == before


@pytest.mark.parametrize("way", ["late", "refused"])
def test_no_rewrite_walks_the_whole_network(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read what is made later, and removals that are taken back, are found a place at once."""

    def act(layer: Layer) -> object:
        old = layer.get_outputs()[0]
        if way == "late":
            other = old.get_users()[0].get_inputs(1)[0]
            old.replace_all_uses_with(F.maximum(layer.get_inputs()[0], other))  # type: ignore[arg-type]
            return True
        old.replace_all_uses_with(F.abs(layer.get_inputs()[0]))  # type: ignore[arg-type]
        layer.mark_as_removed()
        return refuse("no")

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
        for tensor in [F.add(F.relu(x), F.sin(x)) for _ in range(50)]:
            tensor.mark_output()
    before, acting = str(net), manager(Acts("Relu", act))
    walks: list[str] = []
    relabel = Order.relabel

    def counted(order: Order) -> None:
        walks.append("relabel")
        relabel(order)

    monkeypatch.setattr(Order, "relabel", counted)
    acting.rewrite(net)
    assert not walks
    assert way == "late" or str(net) == before
    net.verify()
