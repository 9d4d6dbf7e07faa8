"""Nodes appended to an ONNX model: the checks of guards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from intarsia.engines.guards.kinds import AnyGuard, Checks, Guards

Operand = str | float | int | np.ndarray[Any, Any]  # the name of a tensor, or the values of a constant


class AppendedNodes:
    """Appends nodes and constants to a model, each under a new name that begins with `prefix`."""

    def __init__(self, graph: Any, prefix: str) -> None:
        self._graph: Any = graph
        self._prefix: str = prefix
        self._count: int = 0

    def add(self, kind: str, *inputs: Operand, **attributes: Any) -> str:
        """The name of a node's result."""
        operands, name = [x if isinstance(x, str) else self._constant(x) for x in inputs], self._name()
        self._graph.node.append(helper.make_node(kind, operands, [name], **attributes))
        return name

    def _constant(self, values: float | int | np.ndarray[Any, Any]) -> str:
        array, name = np.asarray(values), self._name()
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}.{self._count}"  # as a network names further results of one layer


def add_checks(
    model: Any,
    output: str,
    guards: Guards,
    inputs: Collection[str],
    number: Callable[[AppendedNodes, AnyGuard], tuple[str, float]],
) -> Checks:
    """Let the model compute a number for each guard that is not of these inputs, in one more output.

    `number` appends the layers of a guard, and gives the name of their result and the most it may be.
    """
    on_inputs, computed = guards.by_input(inputs)
    nodes = AppendedNodes(model.graph, output)
    numbers = [number(nodes, guard) for guard in computed]
    if numbers:
        flat = [nodes.add("Reshape", name, np.array([1])) for name, _ in numbers]
        model.graph.node.append(helper.make_node("Concat", flat, [output], axis=0))
        model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [len(flat)]))
    return Checks(on_inputs, computed, np.array([most for _, most in numbers], dtype=np.float32))
