"""Nodes appended to an ONNX model to compute the checks of its guards."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper


class AppendedNodes:
    """Appends nodes and constants to a model, each under a new name that begins with `prefix`."""

    def __init__(self, graph: Any, prefix: str) -> None:
        self._graph: Any = graph
        self._prefix: str = prefix
        self._count: int = 0

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = self._name()
        self._graph.node.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        name = self._name()
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"
