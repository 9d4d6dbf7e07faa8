"""Networks by hand: look-ups, guards, redirection of uses, removal, drawing, undoing."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.diamond import diamond, layer

from intarsia.errors import NetworkError
from intarsia.network import Network, Tensor, default_net, net_guard
from intarsia.network import functional as F
from intarsia.network.attributes import from_attr, to_attr
from intarsia.network.edit.redirect import remove_dead, undo


def test_look_ups() -> None:
    net = diamond()
    total = layer(net, "add").get_outputs()[0]
    assert [t.name for t in net.get_inputs()] == ["a", "b"]
    assert [t.name for t in net.get_outputs()] == ["y", "z"]
    assert [x.name for x in net.get_layers()] == ["add", "relu", "mul", "neg"]
    assert net.is_input(net.get_inputs()[0]) and not net.is_input(total)
    assert net.is_output(net.get_outputs()[1]) and not net.is_output(total)
    assert total.get_parent() == layer(net, "add") and net.get_inputs()[0].get_parent() is None
    assert [user.name for user in total.get_users()] == ["relu", "mul", "neg"]
    assert net.get_layer_by_name("nowhere") is None
    assert layer(net, "add").as_layer().op_type == "Add"
    assert layer(net, "mul").network is net


def test_the_guard_is_per_thread_and_restores_itself() -> None:
    net = Network()
    with pytest.raises(RuntimeError), net_guard(net):
        raise RuntimeError
    with pytest.raises(NetworkError, match="no network is under guard"):
        default_net()
    seen: list[str] = []

    def other() -> None:
        try:
            default_net()
        except NetworkError as error:
            seen.append(str(error))

    with net_guard(net):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert default_net() is net
    assert len(seen) == 1


def test_a_network_by_hand_runs() -> None:
    net = Network("score")
    with net_guard(net):
        q = Tensor("q", torch.float32, ("b", 4, 8))
        k = F.constant(np.arange(64, dtype=np.float32).reshape(8, 8) / 64)
        bias = F.constant(torch.linspace(-1, 1, 8))
        (F.softmax(F.matmul(q, k) * 0.5) - bias).mark_output("y")
    net.verify()
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(net.to_onnx().SerializeToString())
    weight = torch.arange(64.0).reshape(8, 8) / 64
    expected = torch.softmax(x @ weight * 0.5, -1) - torch.linspace(-1, 1, 8)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"q": x.numpy()})[0]), expected)


def test_replacing_uses_moves_every_slot_and_the_outputs() -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        b = F.relu(a)
        (b * b).mark_output("y")
        b.mark_output("b")
        b.replace_all_uses_with(F.neg(a))
    assert str(net) == (
        "network(a: f32[3]) -> (y: f32[3], b: f32[3])\n  relu = Relu(a)\n  b = Neg(a)\n  y = Mul(b, b)"
    ).replace("relu = Relu(a)", "neg = Relu(a)")
    net.verify()


def test_an_output_replaced_by_an_input_keeps_its_name() -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        b = F.relu(a)
        b.mark_output("y")
        b.replace_all_uses_with(a)
    assert [t.name for t in net.get_outputs()] == ["y"]
    assert "y = Identity(a)" in str(net)
    net.verify()


def test_a_cycle_is_refused_and_nothing_is_changed() -> None:
    net = diamond()
    before = str(net)
    add, mul = layer(net, "add").get_outputs()[0], layer(net, "mul").get_outputs()[0]
    with pytest.raises(NetworkError, match="replacing add with y would close a cycle"):
        add.replace_all_uses_with(mul)
    assert str(net) == before
    net.verify()


def test_readers_that_stand_too_early_are_moved_behind() -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        early = F.relu(a)
        F.neg(F.abs(early)).mark_output("y")
        late = F.exp(a)
        early.replace_all_uses_with(late)
    net.verify()
    assert [x.kind for x in net.get_layers()] == ["Relu", "Exp", "Abs", "Neg"]


def test_insertion_before_a_layer_goes_behind_what_it_reads() -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        first = F.relu(a)
        late = F.exp(a)
        late.mark_output("late")
        with net.before(layer(net, "relu")):
            F.neg(a).mark_output("n")
            (late + first).mark_output("sum")
    net.verify()
    assert [x.kind for x in net.get_layers()] == ["Neg", "Relu", "Exp", "Add"]


def test_many_insertions_before_one_layer_keep_the_order() -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        F.relu(a).mark_output("y")
        x = a
        for _ in range(300):
            with net.before(layer(net, "relu")):
                x = F.neg(x)
    labels = [net.order.of(x.node) for x in net.get_layers()]
    assert labels == sorted(labels) and len(set(labels)) == 301
    net.verify()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=60))
def test_labels_grow_along_the_list(steps: list[tuple[bool, int]]) -> None:
    net = Network()
    with net_guard(net):
        a = Tensor("a", torch.float32, (3,))
        F.exp(a).mark_output("y")
        for put, number in steps:
            layers = list(net.get_layers())
            at = layers[number % len(layers)]
            if put:
                with net.before(at):
                    F.neg(a)
            elif not at.get_outputs()[0].is_output():
                at.mark_as_removed()
            nodes = list(net.graph)
            labels = [net.order.of(node) for node in nodes]
            assert labels == sorted(set(labels))
            assert [net.order.behind(node) for node in nodes] == [*nodes[1:], None]
    net.verify()


def test_a_layer_that_is_read_cannot_be_removed() -> None:
    net = diamond()
    with pytest.raises(NetworkError, match="layer add cannot be removed: add is read by relu, mul, neg"):
        layer(net, "add").mark_as_removed()
    with pytest.raises(NetworkError, match="is read by the network's outputs"):
        layer(net, "neg").mark_as_removed()
    relu = layer(net, "relu")
    with net_guard(net):
        relu.get_outputs()[0].replace_all_uses_with(net.get_inputs()[0])
    relu.mark_as_removed()
    assert relu.is_removed() and net.get_layer_by_name("relu") is None
    net.verify()


def test_a_journal_undoes_everything() -> None:
    net = diamond()
    before, constants = str(net), len(net.graph.initializers)
    net.journal = edits = []
    with net_guard(net), net.before(layer(net, "relu")):
        c = Tensor("c", torch.float32, (2, "n"))
        neg = layer(net, "neg").get_outputs()[0]
        neg.replace_all_uses_with(c)
        relu = layer(net, "relu")
        relu.get_outputs()[0].replace_all_uses_with(F.abs(relu.get_inputs(0)[0]) * 3.0)
        relu.mark_as_removed()
        layer(net, "mul").replace_input(1, c)
        F.exp(c).mark_output("w")
    net.verify()
    assert str(net) != before
    net.journal = None
    undo(net, edits)
    assert str(net) == before and len(net.graph.initializers) == constants
    net.verify()


def test_drawing_and_onnx(tmp_path: object) -> None:
    net = diamond()
    dot = net.to_dot()
    assert dot.startswith('digraph "diamond"') and '"add" -> "relu" [label="f32[2, n]"];' in dot
    proto = net.to_onnx()
    assert [node.op_type for node in proto.graph.node] == ["Add", "Relu", "Mul", "Neg"]


def test_look_ups_do_not_grow_with_the_network() -> None:
    def seconds(size: int) -> float:
        net = Network()
        with net_guard(net):
            x = Tensor("x", torch.float32, (2,))
            for _ in range(size):
                x = F.relu(x)
        node = layer(net, f"relu_{size // 2}")
        start = time.process_time()
        for _ in range(300):
            net.get_layer_by_name(node.name)
            node.get_outputs()[0].get_users()
            node.get_inputs(0)[0].get_parent()
        return time.process_time() - start

    small = min(seconds(50) for _ in range(3))
    assert min(seconds(5000) for _ in range(3)) < 10 * small  # a linear look-up would be 100 times slower


def test_verify_finds_what_is_wrong() -> None:
    net = diamond()
    mul = layer(net, "mul").node
    mul.outputs[0].type = type(mul.outputs[0].type)(F.constant.__globals__["ir"].DataType.INT64)
    with pytest.raises(NetworkError, match="layer mul makes FLOAT"):
        net.verify()
    net = diamond()
    node = layer(net, "add").node
    net.graph.remove(node)
    net.graph.append(node)
    with pytest.raises(NetworkError, match="layer relu reads add before it is made"):
        net.verify()


def test_verify_finds_reads_that_nobody_knows_and_readers_that_read_no_more() -> None:
    net = diamond()
    total, relu = layer(net, "add").node.outputs[0], layer(net, "relu").node
    use = next(iter(total.uses()))
    del total._uses[use]
    with pytest.raises(NetworkError, match="add does not know that layer relu reads it"):
        net.verify()
    total._uses[use] = None
    net.verify()
    net.get_inputs()[0].value._uses[use] = None
    with pytest.raises(NetworkError, match="a believes that layer relu reads it"):
        net.verify()
    del net.get_inputs()[0].value._uses[use]
    total._uses[type(use)(relu, 3)] = None
    with pytest.raises(NetworkError, match="add believes that layer relu reads it"):
        net.verify()


def test_an_opaque_layer_needs_a_domain() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (3,))
        (y,) = F.opaque("plugins", "Twice", x, makes=[(torch.float32, (3,))], factor=2)
        y.mark_output("y")
        with pytest.raises(NetworkError, match="needs a domain of its own"):
            F.opaque("", "Twice", x, makes=[(torch.float32, (3,))])
    net.verify()
    assert str(net).endswith("y = plugins::Twice(x) {factor=2}")


def test_a_tensor_under_two_names_is_copied() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2,))
        made = F.neg(x)
        for tensor, name in ((x, "first"), (made, "second"), (made, "third")):
            tensor.mark_output(name)
    assert [tensor.name for tensor in net.get_inputs()] == ["x"]
    assert [tensor.name for tensor in net.get_outputs()] == ["first", "second", "third"]
    net.verify()


def test_an_input_keeps_its_name() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2,))
        x.mark_output()
        new = F.neg(x)
    with pytest.raises(NetworkError, match="x is both an input and an output"):
        x.replace_all_uses_with(new)
    assert [tensor.name for tensor in (*net.get_inputs(), *net.get_outputs())] == ["x", "x"]
    net.verify()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_edits_are_undone(data: st.DataObject) -> None:
    def number(most: int) -> int:
        return data.draw(st.integers(0, most))

    net = Network()
    with net_guard(net):
        made = [Tensor("x", torch.float32, (2,))]
        for _ in range(2 + number(8)):
            made.append(made[number(len(made) - 1)] + made[number(len(made) - 1)])
        made[-1].mark_output("y")
        before = str(net)
        net.journal = edits = []
        for _ in range(1 + number(8)):
            layers = list(net.get_layers())
            at, other = layers[number(len(layers) - 1)], layers[number(len(layers) - 1)]
            step = number(3)
            if step == 0:
                remove_dead(net, [at.node])
            elif step == 1:
                with net.before(at):
                    F.neg(other.get_outputs()[0])
            elif step == 2:
                with contextlib.suppress(NetworkError):  # a cycle, refused
                    at.get_outputs()[0].replace_all_uses_with(other.get_outputs()[0])
            else:
                net.order.relabel()
        net.journal = None
    undo(net, edits)
    assert str(net) == before
    net.verify()
    labels = [net.order.of(x.node) for x in net.get_layers()]
    assert labels == sorted(set(labels))
    with net_guard(net):
        F.neg(made[-1])
    labels = [net.order.of(x.node) for x in net.get_layers()]
    assert labels == sorted(set(labels))


# Python values as attributes and back.


KIND = ir.AttributeType


@pytest.mark.parametrize(
    ("value", "kind", "back"),
    [
        (3, KIND.INT, 3),
        (True, KIND.INT, 1),
        (ir.DataType.INT64, KIND.INT, 7),
        (0.5, KIND.FLOAT, 0.5),
        ("text", KIND.STRING, "text"),
        ([1, True], KIND.INTS, [1, 1]),
        ((1, 0.5), KIND.FLOATS, [1.0, 0.5]),
        ([], KIND.INTS, []),
        (["a", "b"], KIND.STRINGS, ["a", "b"]),
    ],
)
def test_there_and_back(value: Any, kind: ir.AttributeType, back: Any) -> None:
    attr = to_attr("name", value)
    assert attr.type == kind and from_attr(attr) == back


def test_tensors_and_graphs() -> None:
    tensor = ir.Tensor(np.asarray([1.0], np.float32))
    assert to_attr("value", tensor).type == KIND.TENSOR and from_attr(to_attr("value", tensor)) is tensor
    assert to_attr("body", ir.Graph([], [], nodes=[])).type == KIND.GRAPH


@pytest.mark.parametrize("value", [object(), {"a": 1}, [object()], [1, "a"], [None], 1j])
def test_what_no_layer_can_hold(value: Any) -> None:
    with pytest.raises(NetworkError, match=r"attribute name=.* has a type that no layer can hold"):
        to_attr("name", value)
