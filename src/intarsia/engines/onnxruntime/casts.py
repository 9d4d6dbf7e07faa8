"""Casts to integers that hold less than what is cast to them.

ONNX Runtime makes one cast of two, whatever the first one took away: of 3e9 as 64 and then as 32 bits it
makes 2147483647, where the last 32 bits are -1294967296; of 2^24 + 1 as float32 and then as 16 bits it makes
1, which float32 has lost. And on processors of ARM it makes 0 of some negative numbers as bytes, and of
others the last byte, as PyTorch does of all; elsewhere so of float64 beyond 32 bits.

A guard was tried before: it belongs to the second cast, and does not see float16.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper

from intarsia.engines.onnxruntime.protos import bodies_in
from intarsia.engines.processor import is_arm
from intarsia.network import Network, dtypes
from intarsia.network.ops import KEEPS_VALUES

_PREFIX = "intarsia_cast"
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})
# Those that hold less than what is cast to them may.
_SHORT = frozenset({
    TensorProto.INT32, TensorProto.INT16, TensorProto.INT8,
    TensorProto.UINT32, TensorProto.UINT16, TensorProto.UINT8,
})  # fmt: skip


def cast_through_int64(net: Network, model: Any) -> None:
    """Let floats become 64 bits before they become bytes, where it makes a difference."""
    wide = dtypes.FLOATS if is_arm() else {ir.DataType.DOUBLE}
    made = [tensor for layer in net.get_layers() for tensor in layer.get_outputs()]
    floats = {tensor.name for tensor in (*net.get_inputs(), *made) if tensor.dtype in wide}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if _target(node) == TensorProto.UINT8 and node.input[0] in floats:
            name = f"{_PREFIX}_whole_{node.output[0]}"
            nodes.append(helper.make_node("Cast", [node.input[0]], [name], name=name, to=TensorProto.INT64))
            node.input[0] = name
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def keep_casts_apart(graph: Any) -> None:
    """Put a layer that changes nothing between a cast and another of what it made."""
    made = {node.output[0]: node for node in graph.node}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for body in bodies_in(node):
            keep_casts_apart(body)
        middle = _cast_before(node, made)
        if _target(node) in _SHORT or (_target(node), middle) == (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            nodes += _copied(node, middle, graph)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _cast_before(node: NodeProto, made: dict[str, NodeProto]) -> int:
    """The dtype of the cast whose result a layer reads, be it moved; 0 where there is none."""
    before = made.get(node.input[0]) if node.input else None
    # ONNX Runtime may take such layers out, and then two casts are neighbours.
    while before is not None and before.op_type in KEEPS_VALUES:
        before = made.get(before.input[0])
    return 0 if before is None else _target(before)


def _target(node: NodeProto) -> int:
    """The dtype that a cast is to; 0 for other layers."""
    if node.op_type != "Cast":
        return 0
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _copied(node: NodeProto, dtype: int, graph: Any) -> list[NodeProto]:
    """Layers that give what a cast is given, and that no optimiser knows to do so; the cast reads them."""
    if dtype in (0, TensorProto.BOOL):
        return []
    given, name = node.input[0], f"{_PREFIX}_{node.output[0]}"
    node.input[0] = name
    if dtype in _FLOATS:
        return [helper.make_node("Max", [given], [name], name=name)]
    if dtype == TensorProto.BFLOAT16:  # of which there are no extremes
        wide = helper.make_node("Cast", [given], [f"{name}_wide"], name=f"{name}_wide", to=TensorProto.FLOAT)
        return [wide, helper.make_node("Max", [f"{name}_wide"], [name], name=name)]
    graph.initializer.append(helper.make_tensor(f"{name}_bits", dtype, [], [_all_bits(dtype)]))
    return [helper.make_node("BitwiseAnd", [given, f"{name}_bits"], [name], name=name)]


def _all_bits(dtype: int) -> int:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    return (1 << 8 * kind.itemsize) - 1 if kind.kind == "u" else -1
