"""Every shape rule against ONNX's own inference, on layers made up at random.

A layer that ONNX refuses, our rule refuses; what ONNX knows of an output, our rule knows and says alike.
Layers are taken as made up, with one input or axis changed (mostly wrong then), and with symbols for sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from onnx import defs, helper, shape_inference
from tests.network.infer_cases import MAKERS, Case, Draw, Operand

from intarsia.errors import NetworkError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.network.attributes import to_attr
from intarsia.network.infer.registry import _RULES, infer
from intarsia.network.serialize import to_proto
from intarsia.network.types import OPSET, Shape

Made = list[tuple[ir.DataType | None, Shape | None]]
OPS = sorted(op_type for domain, op_type in _RULES if not domain)


def onnx_says(op_type: str, case: Case) -> Made:
    """Dtype and shape of every output by ONNX; InferenceError where it refuses."""
    try:
        schema = defs.get_schema(op_type, OPSET, "")
    except defs.SchemaError:
        schema = defs.get_schema(op_type, "")  # newer than the opset in use
    names = [f"i{n}" if x is not None else "" for n, x in enumerate(case.inputs)]
    node = helper.make_node(op_type, names, [f"o{n}" for n in range(case.outputs)])
    node.attribute.extend(ir.to_proto(to_attr(key, value)) for key, value in case.attributes.items())
    types, values = {}, {}
    for name, x in zip(names, case.inputs, strict=True):
        if x is not None:
            types[name] = helper.make_tensor_type_proto(int(x.dtype), x.shape)
            if x.value is not None:
                values[name] = onnx.numpy_helper.from_array(x.value, name)
    opset = [helper.make_opsetid("", max(OPSET, schema.since_version))]
    found = shape_inference.infer_node_outputs(schema, node, types, values, opset_imports=opset)
    return [_read(found[name]) if name in found else (None, None) for name in node.output]


def _read(proto: Any) -> tuple[ir.DataType | None, Shape | None]:
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return ir.DataType(tensor.elem_type), None
    dims = tensor.shape.dim
    sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]
    return ir.DataType(tensor.elem_type), tuple(sizes)


def we_say(op_type: str, case: Case) -> Made:
    net = Network()
    with net_guard(net):
        tensors = [
            None
            if x is None
            else Tensor(f"i{n}", x.dtype, x.shape)
            if x.value is None
            else F.constant(x.value, x.dtype)
            for n, x in enumerate(case.inputs)
        ]
    return list(infer("", op_type, tensors, case.attributes, case.outputs))


def compare(op_type: str, case: Case) -> None:
    note(f"{op_type} {case}")
    try:
        theirs = onnx_says(op_type, case)
    except shape_inference.InferenceError as error:
        note(f"ONNX: {error}")
        with pytest.raises(NetworkError):
            we_say(op_type, case)
        return
    note(f"ONNX: {theirs}")
    try:
        ours = we_say(op_type, case)
    except NetworkError as error:
        note(f"refused: {error}")
        if case.changed or any(shape is None for _, shape in theirs):
            return  # a mismatch that ONNX does not look at, or a rank that nobody knows
        raise
    note(f"ours: {ours}")
    assert len(ours) == len(theirs)
    for (dtype, dims), (their_dtype, their_dims) in zip(ours, theirs, strict=True):
        assert dtype == their_dtype or their_dtype in (None, ir.DataType.UNDEFINED)
        if their_dims is None:
            continue
        assert dims is not None and len(dims) == len(their_dims)
        for mine, their in zip(dims, their_dims, strict=True):
            assert mine == their or their is None


def compare_weaker(op_type: str, case: Case, weaker: Case) -> None:
    """What our rule says of a layer of which less is known must be true of the layer that is known."""
    note(f"{op_type} {case} known as {weaker.inputs}")
    theirs = onnx_says(op_type, case)
    try:
        ours = we_say(op_type, weaker)
    except NetworkError:
        return
    note(f"ONNX: {theirs}, ours: {ours}")
    for (dtype, dims), (their_dtype, their_dims) in zip(ours, theirs, strict=True):
        assert dtype == their_dtype
        if their_dims is None:
            continue
        assert dims is not None and len(dims) == len(their_dims)
        for mine, their in zip(dims, their_dims, strict=True):
            assert mine is None or their is None or mine == their or mine == f"n{their}"


def changed(draw: Draw, case: Case) -> Case:
    """The same layer with one size, rank or axis that may not fit."""
    places = [n for n, x in enumerate(case.inputs) if x is not None and x.value is None]
    axes = [name for name in case.attributes if name == "axis"]
    if axes and draw(st.booleans()):
        return replace(case, attributes=case.attributes | {"axis": draw(st.integers(-6, 6))}, changed=True)
    n = draw(st.sampled_from(places)) if places else None
    if n is None:
        return case
    x = case.inputs[n]
    assert x is not None
    sizes = list(x.shape)
    way = draw(st.sampled_from(["size", "longer", "shorter"]))
    if way == "longer" or not sizes:
        sizes.insert(draw(st.integers(0, len(sizes))), draw(st.integers(1, 3)))
    elif way == "shorter":
        sizes.pop(draw(st.integers(0, len(sizes) - 1)))
    else:
        at = draw(st.integers(0, len(sizes) - 1))
        sizes[at] = int(sizes[at] or 0) + 1
    inputs: list[Operand | None] = list(case.inputs)
    inputs[n] = replace(x, shape=tuple(sizes))
    return replace(case, inputs=inputs, changed=True)


def symbolic(draw: Draw, case: Case, *, forget: bool = False) -> Case:
    """The same layer where one size is called by a name, or not known; `forget`: nor are constants."""
    sizes = sorted({d for x in case.inputs if x is not None and x.value is None for d in x.shape if d != 1})
    size = draw(st.sampled_from(sizes)) if sizes else None
    symbol = draw(st.sampled_from([f"n{size}", None]))

    def weaker(x: Operand | None) -> Operand | None:
        if x is None or (x.value is not None and not forget):
            return x
        if x.value is not None:
            return replace(x, value=None)
        if x.dtype == ir.DataType.INT64 and len(x.shape) == 1:
            return x  # how many axes or sizes there are
        return replace(x, shape=tuple(symbol if d == size else d for d in x.shape))

    return replace(case, inputs=[weaker(x) for x in case.inputs])


def test_every_rule_is_compared() -> None:
    assert sorted(MAKERS) == OPS


@pytest.mark.parametrize("op_type", OPS)
def test_rules_agree_with_onnx(op_type: str) -> None:
    """Each layer in all four ways: hypothesis takes longer to make a layer up than we to compare it."""
    few = MAKERS[op_type].__name__ in ("unary", "reduce", "binary")

    @settings(max_examples=5 if few else 30, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = MAKERS[op_type](data.draw)
        compare(op_type, case)
        compare(op_type, changed(data.draw, case))
        compare_weaker(op_type, case, symbolic(data.draw, case))
        compare(op_type, symbolic(data.draw, case))
        compare_weaker(op_type, case, symbolic(data.draw, case, forget=True))

    run()


def test_padding_that_onnx_chooses() -> None:
    window = {"kernel_shape": [7, 7], "strides": [2, 2], "auto_pad": "SAME_UPPER"}
    case = Case([Operand((1, 1, 7, 7))], window)
    assert we_say("MaxPool", case)[0][1] == onnx_says("MaxPool", case)[0][1] == (1, 1, 4, 4)


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "said"),
    [
        ("Gemm", [(2, 3), (4, 5)], {}, "3 against 4"),
        ("Gemm", [(2, 3), (3, 5), (4,)], {}, "does not broadcast"),
        ("Concat", [(2, 3), (2, 4)], {"axis": 0}, "dimension 1 of Concat: 3 against 4"),
    ],
)
def test_verify_refuses_operands_that_do_not_fit(
    op_type: str, shapes: list[Shape], attributes: dict[str, Any], said: str
) -> None:
    net = Network()
    with net_guard(net):
        inputs = [Tensor(f"i{n}", ir.DataType.FLOAT, shape) for n, shape in enumerate(shapes)]
        with pytest.raises(NetworkError, match=said):
            F.op(op_type, *inputs, **attributes)
        layer = net.add_layer(op_type, inputs, attributes, outputs=[(ir.DataType.FLOAT, (2, 5))])
        layer.get_outputs(0)[0].mark_output("y")
    with pytest.raises(NetworkError, match=said):
        net.verify()


def test_the_file_format_knows_the_opset() -> None:
    net = Network()
    with net_guard(net):
        F.relu(Tensor("x", ir.DataType.FLOAT, (2,))).mark_output("y")
    proto = net.to_onnx()
    onnx.checker.check_model(proto)
    assert proto.ir_version >= helper.find_min_ir_version_for(list(proto.opset_import))
    assert to_proto(net)[0].ir_version == proto.ir_version
