"""`Where` that keeps the sign of zero: ONNX Runtime's CPU kernel turns a -0.0 of its first choice into 0.0.

The kernel picks what is not zero of two halves, so only what comes third keeps its sign. It is seen in what
follows: 1 / -0.0, atan2, copysign.

A `Not` of the condition would be taken out again by ONNX Runtime's optimizer, so it is turned round by `Xor`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, helper, numpy_helper

from intarsia.network import Network, dtypes

_PREFIX = "intarsia_signed_zero"


def keep_signed_zeros(net: Network, model: Any) -> None:
    """Rewrite every `Where` of floats whose first choice may hold -0.0, so that none is lost."""
    layers = {t.name: layer for layer in net.get_layers() for t in layer.get_outputs()}
    nodes: list[NodeProto] = []
    count = 0
    for node in model.graph.node:
        layer = layers.get(node.output[0]) if node.op_type == "Where" else None
        if layer is None or layer.get_outputs(0)[0].dtype not in dtypes.FLOATS:
            nodes.append(node)
            continue
        condition, first, second = layer.get_inputs()
        assert condition is not None and first is not None and second is not None
        parent = condition.get_parent()
        given, chosen = node.input[0], list(node.input[1:])
        if parent is not None and parent.kind == "Not":  # ONNX Runtime itself takes out such a `Not`
            before = parent.get_inputs(0)[0]
            assert before is not None
            given, chosen, first, second = before.name, chosen[::-1], second, first
        if _holds_none(first.constant):
            nodes.append(helper.make_node("Where", [given, *chosen], list(node.output), name=node.name))
            continue
        count += 1
        made = _exchanged if _holds_none(second.constant) else _by_product
        nodes += made(f"{_PREFIX}_{count}", given, chosen, node, first.dtype, model.graph)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _holds_none(constant: np.ndarray[Any, Any] | None) -> bool:
    """Whether a constant is known, and none of its elements is -0.0."""
    if constant is None:
        return False
    values = np.asarray(constant).astype(np.float64)
    return not bool(np.any((values == 0) & np.signbit(values)))


def _exchanged(
    name: str, given: str, chosen: list[str], node: NodeProto, dtype: ir.DataType, graph: Any
) -> list[NodeProto]:
    """The choices the other way round: what may be -0.0 comes third."""
    return [
        _opposite(name, given, graph),
        helper.make_node("Where", [f"{name}_not", chosen[1], chosen[0]], list(node.output), name=node.name),
    ]


def _by_product(
    name: str, given: str, chosen: list[str], node: NodeProto, dtype: ir.DataType, graph: Any
) -> list[NodeProto]:
    """Each choice comes third in a `Where` of its own, beside 1; their product is exact."""
    one = helper.make_tensor(f"{name}_one", int(dtype), [], [1.0])
    graph.initializer.append(one)
    return [
        _opposite(name, given, graph),
        helper.make_node("Where", [f"{name}_not", one.name, chosen[0]], [f"{name}_first"]),
        helper.make_node("Where", [given, one.name, chosen[1]], [f"{name}_second"]),
        helper.make_node("Mul", [f"{name}_first", f"{name}_second"], list(node.output), name=node.name),
    ]


def _opposite(name: str, given: str, graph: Any) -> NodeProto:
    """The condition turned round; not by `Not`, which ONNX Runtime would take out and exchange back."""
    graph.initializer.append(numpy_helper.from_array(np.array(True), f"{name}_true"))
    return helper.make_node("Xor", [given, f"{name}_true"], [f"{name}_not"])
