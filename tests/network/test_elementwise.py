"""Functionals that are one layer: what they make, what they refuse, and the call that a layer stands for."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from intarsia.errors import NetworkError
from intarsia.network import FLayerInfoMemo, Layer, Network, Tensor, net_guard
from intarsia.network import functional as F

ALIKE = ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "equal", "greater", "less_equal"]
BOOLS = ["logical_and", "logical_or", "logical_xor"]
UNARY = ["abs", "relu", "exp", "identity", "round", "isnan", "isinf", "hardswish"]


def _made(name: str, dtype: torch.dtype, *, guard: bool) -> tuple[str, dict[str, object]]:
    """The network's text and the call that made its layer."""
    net = Network()
    functional = getattr(F, name)
    with net_guard(net):
        given = [
            Tensor(letter, dtype, (2, "n")) for letter in ("a" if name in (*UNARY, "logical_not") else "ab")
        ]
        if guard:
            made = functional(*given)
    if not guard:
        made = functional(*given)
    made.mark_output("y")
    net.verify()
    info = FLayerInfoMemo.of(net).get(made.get_parent())
    assert info is not None and info.raw_outputs == made and info.layer_kind == name
    return str(net), {key: value.name for key, value in info.raw_inputs.items()}


@pytest.mark.parametrize("name", [*ALIKE, *BOOLS, *UNARY, "logical_not"])
def test_with_a_guard_and_without(name: str) -> None:
    dtype = torch.bool if name.startswith("logical") else torch.float32
    assert _made(name, dtype, guard=True) == _made(name, dtype, guard=False)


def test_operands_are_broadcast() -> None:
    net = Network()
    with net_guard(net):
        a, row = Tensor("a", torch.float32, (2, 3)), Tensor("row", torch.float32, (3,))
        assert (a + row).shape == (a * 2.0).shape == (2, 3)
        assert F.greater(row, a).dtype == ir.DataType.BOOL


@pytest.mark.parametrize(
    ("name", "dtypes", "said"),
    [
        ("logical_and", (torch.float32, torch.float32), "And of .*f32.*: A typestr: T, has unsupported type"),
        ("logical_not", (torch.float32,), r"Not of .*has unsupported type: tensor\(float\)"),
        ("relu", (torch.bool,), r"Relu of .*has unsupported type: tensor\(bool\)"),
        ("maximum", (torch.bool, torch.bool), r"Max of .*has unsupported type: tensor\(bool\)"),
        ("add", (torch.float32, torch.int64), r"Add of .*f32.*i64.*: B has inconsistent type"),
    ],
)
def test_dtypes_that_an_operator_does_not_take(name: str, dtypes: tuple[torch.dtype, ...], said: str) -> None:
    net = Network()
    with net_guard(net):
        given = [Tensor(letter, dtype, (2,)) for letter, dtype in zip("ab", dtypes, strict=False)]
        with pytest.raises(NetworkError, match=said):
            getattr(F, name)(*given)
        with pytest.raises(NetworkError, match=r"Add of .*input size 1 not in range \[min=2, max=2\]"):
            F.op("Add", given[0])
    assert not len(net)


def test_a_call_is_not_confused_by_an_older_move_of_what_it_reads_now() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2, 3))
        first, second, third = F.exp(x), F.neg(x), F.abs(x)
        F.relu(second).mark_output()
        total = F.add(third, third)
        total.mark_output()
        second.replace_all_uses_with(first)
        third.replace_all_uses_with(second)
        info = FLayerInfoMemo.instance().get(total.get_parent())
        assert info is not None and info.raw_inputs == {"a": second, "b": second}


def test_names_are_shared_with_onnx_ir() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2,))
        net.scope = "val_0"
        y = F.add(x, x)
    raw = ir.Node("", "Neg", [y.value])
    net.graph.append(raw)
    assert raw.outputs[0].name != y.name == "val_0"
    assert net.unique_name(str(raw.outputs[0].name)) != raw.outputs[0].name


def test_layers_are_found_by_name_before_and_after_edits() -> None:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (2,))
        y = F.add(x, x)
        assert net.get_layer_by_name("add") == y.get_parent()
        z = F.mul(y, y)
        z.mark_output("z")
        assert net.get_layer_by_name("mul") == z.get_parent()
        z.replace_all_uses_with(F.sub(x, x))
        for name in ("mul", "add"):
            layer = net.get_layer_by_name(name)
            assert isinstance(layer, Layer)
            layer.mark_as_removed()
            assert net.get_layer_by_name(name) is None
        assert net.get_layer_by_name("sub") is not None
