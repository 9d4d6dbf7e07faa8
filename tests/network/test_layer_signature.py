"""Signatures stay true through every rewrite; types of results are inferred."""

from __future__ import annotations

import re
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from intarsia.errors import NetworkError
from intarsia.network import FLayerInfo, FLayerInfoMemo, Layer, Network, Tensor, net_guard, record_signature
from intarsia.network import functional as F
from intarsia.network.edit.redirect import undo
from intarsia.network.serialize import to_proto
from intarsia.network.signature import tensors_in
from intarsia.network.value import Shape


def info_of(tensor: Tensor) -> FLayerInfo:
    parent = tensor.get_parent()
    assert parent is not None
    found = FLayerInfoMemo.of(tensor.network).get(parent)
    assert found is not None
    return found


def given_input(net: Network, name: str = "x") -> Tensor:
    with net_guard(net):
        return Tensor(name, torch.float32, (2, 3))


def test_arguments_are_recorded_by_name_with_defaults() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        y = F.gelu(x)
    info = info_of(y)
    assert info.layer_kind == "gelu"
    assert info.raw_inputs == {"x": x, "approximate": "none"}
    assert info.raw_outputs == y
    assert list(info.signature.parameters) == ["x", "approximate"]


def test_a_functional_that_makes_nothing_leaves_the_signature_alone() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        y = F.relu(x)
        assert F.cast(y, torch.float32) == y
    assert info_of(y).layer_kind == "relu"


@record_signature
def block(x: Tensor, *, twice: bool = False) -> dict[str, Any]:
    y = F.silu(x)
    return {"one": y, "more": [F.neg(y), F.abs(y)] if twice else []}


def test_nested_functionals_and_structured_outputs() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        made = block(x, twice=True)
    for tensor in tensors_in(made):
        assert info_of(tensor).layer_kind == "block"
        assert info_of(tensor).raw_outputs == made
    sigmoid = net.get_layer_by_name("sigmoid")
    assert sigmoid is not None
    inner = FLayerInfoMemo.of(net).get(sigmoid)  # what stands inside is a call of its own
    assert inner is not None and (inner.layer_kind, inner.raw_inputs) == ("sigmoid", {"x": x})


def test_only_a_layer_that_is_one_call_stands_for_it_unasked() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        memo = FLayerInfoMemo.instance()
        plain = F.op("Max", x, x)
        for other in (F.op("Max", x, x, x), F.op("Max", x), F.op("IsInf", x, detect_negative=0)):
            assert memo.get(other.get_parent()) is None
        (far,) = F.opaque("plugins", "Relu", x, makes=[(x.dtype, x.shape)])
        assert memo.get(far.get_parent()) is None
        info = memo.get("max")
        assert info is not None and info.raw_inputs == {"a": x, "b": x} and info.raw_outputs == plain
        layer = plain.get_parent()
        layer.mark_as_removed()
        assert memo.get(layer) is None and memo.get("max") is None and not info.is_true()


def test_a_layer_that_stands_for_its_call_tells_what_is_true_now() -> None:
    net, other = Network(), Network()
    x, z = given_input(net), given_input(net, "z")
    with net_guard(net):
        memo = FLayerInfoMemo.instance()
        first, second = F.op("Relu", x), F.op("Neg", x)
        F.op("Exp", first).mark_output("y")
        held = memo.get(first.get_parent())
        first.replace_all_uses_with(second)
        assert held is not None and held.is_true() and held.raw_outputs == second
        assert info_of(first).raw_outputs == second
        first.get_parent().replace_input(0, z)
        assert held.is_true() and held.raw_inputs == {"x": z} == info_of(first).raw_inputs
        held.replace_input_with(z, x)
        assert first.get_parent().get_inputs() == [x]
        assert FLayerInfoMemo.of(other).get(first.get_parent()) is None
        third, lost = F.tanh(x), F.abs(x)
        third.replace_all_uses_with(lost)
        lost.get_parent().mark_as_removed()
        assert memo.get(third.get_parent()) is None
        first.get_parent().mark_as_removed()
        assert not held.is_true() and held.raw_inputs == {"x": x}


def test_calls_follow_layers_and_not_their_names() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        soft, made = F.softmax(x, axis=1), F.elu(x)
    one, other = soft.get_parent().node, made.get_parent().node
    one.name, other.name = other.name, one.name
    memo = FLayerInfoMemo.of(net)
    assert [memo.get(layer).layer_kind for layer in (Layer(one), Layer(other))] == ["softmax", "elu"]  # type: ignore[union-attr]
    assert memo.get(str(one.name)).layer_kind == "softmax"  # type: ignore[union-attr]


def test_replacing_an_input_changes_the_layer_too() -> None:
    net = Network()
    x, z = given_input(net), given_input(net, "z")
    with net_guard(net):
        y = F.silu(x)
        y.mark_output("y")
    info = info_of(y)
    info.replace_input_with(x, z)
    assert info.get_input("x") == z
    assert all(x not in layer.get_inputs() for layer in net.get_layers())
    net.verify()


def test_one_read_replaced_is_told_or_ends_the_signature() -> None:
    net = Network()
    x, z = given_input(net), given_input(net, "z")
    with net_guard(net):
        one, both, inner = F.relu(x), F.add(x, x), F.silu(x)
    memo = FLayerInfoMemo.of(net)
    assert info_of(both).get_input("b") == x
    Layer(one.value.producer()).replace_input(0, z)  # type: ignore[arg-type]
    Layer(both.value.producer()).replace_input(1, z)  # type: ignore[arg-type]
    assert info_of(one).raw_inputs == {"x": z}
    assert info_of(both).raw_inputs == {"a": x, "b": z}
    sigmoid = net.get_layer_by_name("sigmoid")
    assert sigmoid is not None and info_of(inner).get_input("x") == x
    sigmoid.replace_input(0, z)
    assert memo.get(inner.get_parent()) is None  # type: ignore[arg-type]


def test_an_undo_brings_back_what_signatures_said() -> None:
    net = Network()
    x, z = given_input(net), given_input(net, "z")
    with net_guard(net):
        mid = F.exp(x)
        whole, one, pair = F.silu(mid), F.relu(mid), F.add(mid, z)
    net.journal = edits = []
    info_of(whole).replace_input_with(mid, z)
    Layer(one.value.producer()).replace_input(0, z)  # type: ignore[arg-type]
    mid.replace_all_uses_with(z)
    assert [info_of(t).get_input(n) for t, n in ((whole, "x"), (one, "x"), (pair, "a"))] == [z, z, z]
    net.journal = None
    undo(net, edits)
    assert [info_of(t).get_input(n) for t, n in ((whole, "x"), (one, "x"), (pair, "a"))] == [mid, mid, mid]


def test_outputs_are_replaced_by_key() -> None:
    net = Network()
    x = given_input(net)
    with net_guard(net):
        made = block(x, twice=True)
        for tensor in tensors_in(made):
            tensor.mark_output()
        info = info_of(made["one"])
        new = {"one": F.exp(x), "more": [F.sin(x), F.cos(x)]}
        info.replace_outputs_uses_with(net, new)
    assert [t.get_parent().kind for t in net.get_outputs()] == ["Exp", "Sin", "Cos"]  # type: ignore[union-attr]
    net.verify()


def check_signatures(net: Network) -> int:
    """Every signature mentions living tensors, and what its layer really reads."""
    memo, checked = FLayerInfoMemo.of(net), 0
    for layer in net.get_layers():
        info = memo.get(layer)
        if info is None:
            continue
        checked += 1
        mentioned = list(tensors_in(info.raw_inputs))
        assert all(t.value.graph is net.graph for t in mentioned)
        assert any(t.get_parent() == layer for t in tensors_in(info.raw_outputs))
        if info.layer_kind in ("relu", "neg", "add", "sub", "mul"):
            assert mentioned == [t for t in layer.get_inputs() if t is not None and t.constant is None]
    return checked


UNARY = {"relu": F.relu, "neg": F.neg, "silu": F.silu}
BINARY = {"add": F.add, "sub": F.sub, "mul": F.mul}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_rewrites_keep_signatures_true(data: st.DataObject) -> None:
    net = Network()
    tensors = [given_input(net), given_input(net, "z")]

    def pick(pool: list[Tensor]) -> Tensor:
        return pool[data.draw(st.integers(0, len(pool) - 1))]

    def make(pool: list[Tensor]) -> Tensor:
        name = data.draw(st.sampled_from(sorted([*UNARY, *BINARY])))
        return UNARY[name](pick(pool)) if name in UNARY else BINARY[name](pick(pool), pick(pool))

    with net_guard(net):
        for _ in range(data.draw(st.integers(2, 10))):
            tensors.append(make(tensors))
        tensors[-1].mark_output("y")
        assert check_signatures(net)
        for _ in range(data.draw(st.integers(1, 12))):
            layers = list(net.get_layers())
            if not layers:
                return
            layer = layers[data.draw(st.integers(0, len(layers) - 1))]
            back = data.draw(st.booleans())
            before = str(net)
            net.journal = edits = []
            rewrite_one(net, layer, make)
            net.journal = None
            net.verify()
            check_signatures(net)
            if back:
                undo(net, edits)
                assert str(net) == before
                net.verify()
                check_signatures(net)


def rewrite_one(net: Network, layer: Layer, make: Any) -> None:
    """Put something else made of earlier tensors in the place of a layer."""
    old = layer.get_outputs()[0]
    earlier = [t for other in net.get_layers() for t in other.get_outputs()]
    earlier = earlier[: earlier.index(old)]
    with net.before(layer):
        new = make([*net.get_inputs(), *earlier])
    old.replace_all_uses_with(new)
    layer.mark_as_removed()


# What layers make is inferred by ONNX; operands that do not fit are refused with a sentence.


def tensors(*shapes: Shape) -> list[Tensor]:
    return [Tensor(f"i{n}", ir.DataType.FLOAT, shape) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "reason"),
    [
        (
            "MatMul",
            [(2, 3), (4, 5)],
            {},
            "of Tensor(i0: f32[2, 3]), Tensor(i1: f32[4, 5]): Incompatible",
        ),
        ("Gemm", [(2, 3), (4, 5)], {}, "Gemm of"),
        ("Concat", [(2, 3), (2, 4)], {"axis": 0}, "1"),
        ("Softmax", [(2, 3)], {"axis": 2}, "axis"),
    ],
)
def test_operands_that_do_not_fit(
    op_type: str, shapes: list[Shape], attributes: dict[str, Any], reason: str
) -> None:
    net = Network()
    with net_guard(net):
        inputs = tensors(*shapes)
        with pytest.raises(NetworkError, match=re.escape(reason)):
            F.op(op_type, *inputs, **attributes)
        layer = net.add_layer(op_type, inputs, attributes, outputs=[(ir.DataType.FLOAT, (2, 5))])
        layer.get_outputs(0)[0].mark_output("y")
    with pytest.raises(NetworkError, match=re.escape(reason)):
        net.verify()


def test_symbols_and_constants_reach_the_shape() -> None:
    with net_guard(Network()):
        (x,) = tensors(("2*s0", 4, 8))
        assert F.op("MatMul", x, F.constant(torch.ones(8, 1))).shape == ("2*s0", 4, 1)
        assert F.op("Reshape", x, F.ints([0, -1])).shape == ("2*s0", 32)


def test_an_operator_that_nobody_defines() -> None:
    with net_guard(Network()), pytest.raises(NetworkError, match="no shape rule for plugins::Unheard"):
        F.op("Unheard", *tensors((2,)), domain="plugins")


def test_a_rank_that_depends_on_values() -> None:
    with net_guard(Network()):
        (x,) = tensors((2, 3))
        axes = Tensor("axes", ir.DataType.INT64, ("n",))
        with pytest.raises(NetworkError, match="number of dimensions cannot be inferred"):
            F.op("ReduceSum", x, axes, keepdims=0)


def test_the_file_format_knows_the_opset() -> None:
    net = Network()
    with net_guard(net):
        F.relu(Tensor("x", ir.DataType.FLOAT, (2,))).mark_output("y")
    proto = net.to_onnx()
    onnx.checker.check_model(proto)
    assert proto.ir_version >= helper.find_min_ir_version_for(list(proto.opset_import))
    assert to_proto(net)[0].ir_version == proto.ir_version
