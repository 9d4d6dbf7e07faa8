"""Layers with bodies: what those read of the network around them is read, moved, let go and brought back."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from tests.network.diamond import diamond, layer

from intarsia.errors import NetworkError
from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.network.attributes import bodies_of, outer_uses, owner_in
from intarsia.rewrite import PatternRewriter, RewritePatternManager


def body(kind: str, read: Tensor) -> ir.Graph:
    net = Network(kind)
    with net_guard(net):
        F.op(kind, read).mark_output(f"{kind}_out")
    return net.graph


def branch(net: Network, condition: Tensor, one: ir.Graph, other: ir.Graph) -> Tensor:
    made = net.add_layer(
        "If",
        [condition],
        {"then_branch": one, "else_branch": other},
        outputs=[(ir.DataType.FLOAT, (2, 3))],
    )
    return made.get_outputs()[0]


def branching() -> tuple[Network, Tensor]:
    """A network whose If reads a tensor in its bodies alone."""
    net = Network()
    with net_guard(net):
        x, condition = Tensor("x", torch.float32, (2, 3)), Tensor("c", torch.bool, ())
        inside, beside = F.exp(x), F.neg(x)
        made = branch(net, condition, body("Relu", inside), body("Abs", inside))
        (made + beside).mark_output("y")
    net.verify()
    return net, inside


class Acts(PatternRewriter):
    def __init__(self, kind: str, act: object) -> None:
        super().__init__("acts", root_layer={kind})
        self.act_on = act

    def match_and_rewrite(self, layer: Layer) -> bool:
        return bool(self.act_on(layer))  # type: ignore[operator]


def manager(kind: str, act: object) -> RewritePatternManager:
    made = RewritePatternManager()
    made.add("acts", Acts(kind, act))
    return made


def test_owners() -> None:
    net, inside = branching()
    (holder,) = (layer.node for layer in net.get_layers() if layer.kind == "If")
    assert len(bodies_of(holder)) == 2
    assert [value for *_, value in outer_uses(holder)] == [inside.value] * 2
    for reader, _, _ in outer_uses(holder):
        assert owner_in(net.graph, reader) is holder
        assert reader.graph is not None
        reader.graph.meta.clear()  # as in a graph made elsewhere
        assert owner_in(net.graph, reader) is holder
    assert owner_in(Network().graph, outer_uses(holder)[0][0]) is None


def test_a_removed_layer_lets_go_of_what_its_bodies_read() -> None:
    net, inside = branching()

    def by_the_other(layer: Layer) -> bool:
        beside = net.get_layer_by_name("neg")
        assert beside is not None
        layer.get_outputs()[0].replace_all_uses_with(beside.get_outputs()[0])
        return True

    acting, before = manager("If", by_the_other), str(net)
    assert len(acting.matches(net)) == 1  # tried and taken back
    assert str(net) == before and len(inside.value.uses()) == 2
    net.verify()
    assert str(acting.rewrite(net)) == "acts: if, exp -> nothing"
    assert [layer.kind for layer in net.get_layers()] == ["Neg", "Add"]
    net.verify()


def test_bodies_change_hands() -> None:
    net, inside = branching()

    def turned(layer: Layer) -> bool:
        (condition,) = layer.get_inputs()
        assert condition is not None
        one, other = layer.attribute("else_branch"), layer.attribute("then_branch")
        layer.get_outputs()[0].replace_all_uses_with(branch(net, F.logical_not(condition), one, other))
        return True

    acting, before = manager("If", turned), str(net)
    assert acting.matches(net) and str(net) == before
    acting.rewrite(net, limit=2)
    assert len(inside.value.uses()) == 2
    net.verify()


def test_a_new_layer_stands_behind_what_its_bodies_read() -> None:
    net = Network()
    with net_guard(net):
        x, condition = Tensor("x", torch.float32, (2, 3)), Tensor("c", torch.bool, ())
        early, late = F.relu(x), F.exp(x)
        (early * late).mark_output("y")

    def chosen(layer: Layer) -> bool:
        made = branch(net, condition, body("Abs", late), body("Neg", late))
        layer.get_outputs()[0].replace_all_uses_with(made)
        return True

    acting, before = manager("Relu", chosen), str(net)
    assert acting.matches(net) and str(net) == before
    acting.rewrite(net)
    assert [layer.kind for layer in net.get_layers()] == ["Exp", "If", "Mul"]
    net.verify()


def test_a_body_is_the_one_reader_left() -> None:
    net = Network()
    with net_guard(net):
        x, condition = Tensor("x", torch.float32, (2, 3)), Tensor("c", torch.bool, ())
        inside = F.exp(x)
        F.relu(inside).mark_output("y")
        branch(net, condition, body("Relu", inside), body("Abs", x)).mark_output("z")

    def by_another(layer: Layer) -> bool:
        if layer.get_inputs()[0] != inside:
            return False
        layer.get_outputs()[0].replace_all_uses_with(F.relu(x))
        return True

    assert len(manager("Relu", by_another).rewrite(net)) == 1
    net.verify()


def test_a_raw_layer_with_bodies_lets_go_of_what_they_read() -> None:
    net = Network()
    with net_guard(net):
        x, condition = Tensor("x", torch.float32, (2, 3)), Tensor("c", torch.bool, ())
        inside = F.exp(x)
    made = ir.Value(name="raw", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
    branches = [
        ir.AttrGraph(name, body(kind, inside))
        for name, kind in (("then_branch", "Relu"), ("else_branch", "Neg"))
    ]
    raw = ir.Node("", "If", [condition.value], branches, name="raw", outputs=[made])
    net.graph.append(raw)
    Layer(raw).mark_as_removed()
    assert not inside.get_users()
    inside.get_parent().mark_as_removed()
    net.verify()


def test_a_layer_with_bodies_that_is_taken_back_reads_nothing() -> None:
    net, inside = branching()
    before, readers = str(net), inside.value.uses()

    def fresh(layer: Layer) -> bool:
        branch(net, net.get_inputs()[1], body("Relu", inside), body("Neg", inside))
        return False

    def shared(layer: Layer) -> bool:  # its bodies are those of the If that stands there
        branch(net, net.get_inputs()[1], *bodies_of(layer.node))
        return False

    for act in (fresh, shared):
        assert not manager("If", act).rewrite(net).fired
        assert str(net) == before and inside.value.uses() == readers
        net.verify()
    (holder,) = (layer.node for layer in net.get_layers() if layer.kind == "If")
    assert all(owner_in(net.graph, use.node) is holder for use in readers)


def test_verify_counts_only_a_bodys_own_tensors() -> None:
    net = Network()
    with net_guard(net):
        x, condition = Tensor("x", torch.float32, (2, 3)), Tensor("c", torch.bool, ())
        outer = F.exp(x)
        inner = Network("inner")
        with net_guard(inner):
            first = F.neg(outer)
            F.relu(first).mark_output("made")
        branch(net, condition, inner.graph, body("Abs", outer)).mark_output("y")
    net.verify()
    use = next(iter(first.value.uses()))
    first.value._uses[type(use)(use.node, 7)] = None
    with pytest.raises(NetworkError, match="neg believes that layer relu reads it"):
        net.verify()


# What is done to the raw graph behind a network's back, and what the network still knows of it.


def raw_neg(read: Tensor, name: str) -> ir.Node:
    made = ir.Value(name=name, type=ir.TensorType(read.dtype), shape=ir.Shape([2, "n"]))
    return ir.Node("", "Neg", [read.value], outputs=[made], name=name)


def test_raw_nodes_are_found_by_name() -> None:
    net = diamond()
    assert net.get_layer_by_name("mine") is None
    node = raw_neg(net.get_inputs()[0], "mine")
    net.graph.append(node)
    assert layer(net, "mine").node is node
    net.graph.remove(node, safe=True)
    net.graph.append(raw_neg(net.get_inputs()[0], "another"))
    assert net.get_layer_by_name("mine") is None and layer(net, "another").kind == "Neg"


def test_a_layer_that_is_gone_is_missed() -> None:
    net = diamond()
    with net_guard(net):
        F.exp(net.get_inputs()[0])
    layer(net, "exp").mark_as_removed()
    assert net.get_layer_by_name("exp") is None
    with net_guard(net):
        F.log(net.get_inputs()[0])
    for name in ("exp", "nowhere", "log_1"):
        assert net.get_layer_by_name(name) is None
    assert layer(net, "log").kind == "Log"
    # One raw node goes and another comes, under a name that was taken once.
    net.graph.remove(layer(net, "log").node, safe=True)
    net.graph.append(raw_neg(net.get_inputs()[0], "exp"))
    assert layer(net, "exp").kind == "Neg" and net.get_layer_by_name("log") is None
    layer(net, "exp").node.name = "renamed"
    assert net.get_layer_by_name("exp") is None and layer(net, "renamed").kind == "Neg"


def test_raw_moves_are_noticed() -> None:
    net = diamond()
    first, last = layer(net, "add").node, raw_neg(net.get_inputs()[0], "mine")
    net.order.complete()
    net.graph.append(last)
    net.order.complete()
    net.graph.remove(last)
    net.graph.insert_before(first, last)
    net.order.complete()
    assert net.order.of(last) < net.order.of(first)


def test_order_is_kept_where_labels_are_made_midway() -> None:
    def given() -> tuple[Network, Tensor, Layer]:
        net = diamond()
        a = net.get_inputs()[0]
        raw = [raw_neg(a, name) for name in ("first", "second")]
        net.graph.extend(raw)  # which have no labels
        with net_guard(net):
            return net, F.exp(a), Layer(raw[1])

    net, made, layer = given()
    with net_guard(net), net.before(layer):
        F.log(made)
    net.verify()
    net, made, layer = given()
    layer.replace_input(0, made)
    net.verify()


def test_a_layer_before_one_without_a_label() -> None:
    net = diamond()
    a = net.get_inputs()[0]
    raw = raw_neg(a, "raw")
    net.graph.append(raw)
    with net_guard(net):
        with net.before(Layer(raw)):
            made = F.exp(a)
        with net.before(layer(net, "mul")):
            F.log(made)
    net.verify()
    labels = [net.order.of(node) for node in net.graph]
    assert labels == sorted(labels)
