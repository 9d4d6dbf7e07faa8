"""What is done to the raw graph behind a network's back, and what the network still knows of it."""

from __future__ import annotations

import onnx_ir as ir
from tests.network.diamond import diamond, layer

from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F


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
