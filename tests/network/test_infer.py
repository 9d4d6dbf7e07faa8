"""What layers make is inferred by ONNX; operands that do not fit are refused with a sentence."""

from __future__ import annotations

import re
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from intarsia.errors import NetworkError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.network.serialize import to_proto
from intarsia.network.value import Shape


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
