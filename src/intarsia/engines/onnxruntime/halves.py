"""float16 computed in float32, on processors of ARM.

There ONNX Runtime has kernels that add up in float16: a product of 1024 terms is off by 1 % of its largest
element, GELU by 6 %, and grouped convolutions are wrong altogether. Elsewhere it has none of them: it casts
by itself, and rounds where float16 is asked for, not between two layers that compute. So it is done here.

ONNX Runtime's float16 kernels for ARM add up in float16: a product of 1,024 terms is off by 1 % of the
largest value. Elsewhere it has none and casts by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper

from intarsia.engines.onnxruntime.corrections import bodies_in, names_read
from intarsia.network import Network
from intarsia.network.ops import MOVES_DATA

_PREFIX = "intarsia_float"
# fmt: off
# Layers that make what they are told to, whatever they read; those of 8 bits have one kernel everywhere.
_TOLD = frozenset({
    "Bernoulli", "BitCast", "Cast", "CastLike", "Constant", "ConstantOfShape", "DequantizeLinear", "EyeLike",
    "OneHot", "QuantizeLinear", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
    "Shape", "Size",
})
# fmt: on


def compute_in_float32(net: Network, model: Any) -> None:
    """Let every layer of the model that computes with float16 do so in float32.

    Values that are still read keep their names and dtypes. The casts of weights are folded when a session is
    made.
    """
    values = [value for node in net.graph for value in (*node.inputs, *node.outputs) if value is not None]
    halves = {str(value.name) for value in values if value.dtype == ir.DataType.FLOAT16}
    halves |= _names(model.graph, TensorProto.FLOAT16)
    if halves or any(map(bodies_in, model.graph.node)):
        _Floats(model.graph, halves, {}, set(), itertools.count(1)).rewrite()


class _Floats:
    """The float32 values of one graph, by the names of the float16 ones that they stand for."""

    def __init__(
        self, graph: Any, halves: set[str], known: dict[str, str], constants: set[str], numbers: Iterator[int]
    ) -> None:
        self._graph = graph
        self._halves = halves
        self._known = known  # those that were cast, and those that were computed
        self._constants = constants | {tensor.name for tensor in graph.initializer}
        self._numbers = numbers
        self._nodes: list[NodeProto] = []

    def rewrite(self) -> None:
        for node in self._graph.node:
            for body in bodies_in(node):
                self._rewrite_body(body)
            if node.op_type in MOVES_DATA and not self._halves.isdisjoint(node.input):
                self._halves.update(node.output)  # which nobody may have told the type of
            self._give(node) if self._is_computed(node) else self._nodes.append(node)
        self._keep(self._nodes)
        read = names_read(self._graph)
        self._keep([node for node in self._nodes if not _is_own(node) or node.output[0] in read])

    def _keep(self, nodes: list[NodeProto]) -> None:
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _rewrite_body(self, body: Any) -> None:
        own = _names(body)
        halves = self._halves - own | _names(body, TensorProto.FLOAT16)
        known = {half: made for half, made in self._known.items() if half not in own}
        _Floats(body, halves, known, self._constants - own, self._numbers).rewrite()

    def _is_computed(self, node: NodeProto) -> bool:
        if bodies_in(node) or node.op_type in _TOLD:
            return False
        reduces = any(one.name == "reduction" and one.s != b"none" for one in node.attribute)
        if reduces or node.op_type not in MOVES_DATA:
            return True
        moved = {name for name in node.input if name in self._halves} - self._constants
        return bool(moved) and moved <= self._known.keys()

    def _give(self, node: NodeProto) -> None:
        """Append a layer that reads and makes float32 in place of float16."""
        for place, name in enumerate(node.input):
            if name not in self._halves:
                continue
            if name not in self._known:
                self._known[name] = self._cast(name, f"{_PREFIX}_{next(self._numbers)}", TensorProto.FLOAT)
            node.input[place] = self._known[name]
        self._nodes.append(node)
        for place, name in enumerate(node.output):
            if name in self._halves:
                node.output[place] = self._known[name] = f"{_PREFIX}_{next(self._numbers)}"
                self._cast(node.output[place], name, TensorProto.FLOAT16)

    def _cast(self, given: str, made: str, dtype: int) -> str:
        self._nodes.append(helper.make_node("Cast", [given], [made], name=f"{_PREFIX}_to_{made}", to=dtype))
        return made


def _is_own(node: NodeProto) -> bool:
    return node.op_type == "Cast" and node.name.startswith(_PREFIX)


def _names(graph: Any, dtype: int | None = None) -> set[str]:
    """The values that a graph says the type of, of one dtype or all."""
    told = [*graph.input, *graph.value_info, *graph.output]
    types = [(one.name, one.type.tensor_type.elem_type) for one in told]
    types += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
    return {name for name, found in types if dtype is None or found == dtype}
