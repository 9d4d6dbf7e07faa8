"""Replacements of layers that ONNX Runtime computes wrongly: casts, signed zeros, reciprocals, float16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper

from intarsia.cache.machine import is_arm
from intarsia.network import Network, dtypes
from intarsia.network.ops import KEEPS_VALUES, MOVES_DATA
from intarsia.network.serialize import replace_nodes

# What a graph of ONNX's own format holds: bodies of its nodes, and the names that are read.


def bodies_in(node: Any) -> list[Any]:
    """The graphs that a node holds."""
    return [
        body
        for attribute in node.attribute
        for body in ([attribute.g] if attribute.HasField("g") else attribute.graphs)
    ]


def names_read(graph: Any) -> set[str]:
    """Names that are read in a graph, in the bodies of its nodes too."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        names.update(*map(names_read, bodies_in(node)))
    return names


# Casts to integers that hold less than what is cast to them.
#
# ONNX Runtime makes one cast of two, whatever the first one took away: of 3e9 as 64 and then as 32 bits it
# makes 2147483647, where the last 32 bits are -1294967296; of 2^24 + 1 as float32 and then as 16 bits it
# makes 1, which float32 has lost. And on processors of ARM it makes 0 of some negative numbers as bytes,
# and of others the last byte, as PyTorch does of all; elsewhere so of float64 beyond 32 bits.
#
# A guard was tried before: it belongs to the second cast, and does not see float16.


_CAST = "intarsia_cast"
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})
# Those that hold less than what is cast to them may.
_SHORT = frozenset({
    TensorProto.INT32, TensorProto.INT16, TensorProto.INT8,
    TensorProto.UINT32, TensorProto.UINT16, TensorProto.UINT8,
})  # fmt: skip


def cast_through_int64(net: Network, model: Any) -> None:
    """Let floats become 64 bits before they become bytes, where it makes a difference."""
    wide = dtypes.FLOATS if is_arm() else {ir.DataType.DOUBLE}
    tensors = [tensor for layer in net.get_layers() for tensor in layer.get_outputs()]
    floats = {tensor.name for tensor in (*net.get_inputs(), *tensors) if tensor.dtype in wide}

    def whole_first(node: NodeProto) -> list[NodeProto]:
        if _target(node) != TensorProto.UINT8 or node.input[0] not in floats:
            return [node]
        name = f"{_CAST}_whole_{node.output[0]}"
        whole = helper.make_node("Cast", [node.input[0]], [name], name=name, to=TensorProto.INT64)
        node.input[0] = name
        return [whole, node]

    replace_nodes(model.graph, whole_first)


def keep_casts_apart(graph: Any) -> None:
    """Put a layer without effect between two casts in a row."""
    producers = {node.output[0]: node for node in graph.node}

    def apart(node: NodeProto) -> list[NodeProto]:
        for body in bodies_in(node):
            keep_casts_apart(body)
        middle = _cast_before(node, producers)
        loses = (_target(node), middle) == (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        return [*(_copied(node, middle, graph) if loses or _target(node) in _SHORT else ()), node]

    replace_nodes(graph, apart)


def _cast_before(node: NodeProto, producers: dict[str, NodeProto]) -> int:
    """The dtype of the cast whose producers a layer reads, be it moved; 0 where there is none."""
    before = producers.get(node.input[0]) if node.input else None
    # ONNX Runtime may take such layers out, and then two casts are neighbours.
    while before is not None and before.op_type in KEEPS_VALUES:
        before = producers.get(before.input[0])
    return 0 if before is None else _target(before)


def _target(node: NodeProto) -> int:
    """The dtype that a cast is to; 0 for other layers."""
    if node.op_type != "Cast":
        return 0
    return next(int(attribute.i) for attribute in node.attribute if attribute.name == "to")


def _copied(node: NodeProto, dtype: int, graph: Any) -> list[NodeProto]:
    """Layers that return their input, which no optimizer recognizes; the cast reads them."""
    if dtype in (0, TensorProto.BOOL):
        return []
    source, name = node.input[0], f"{_CAST}_{node.output[0]}"
    node.input[0] = name
    if dtype in _FLOATS:
        return [helper.make_node("Max", [source], [name], name=name)]
    if dtype == TensorProto.BFLOAT16:  # of which there are no extremes
        wide = helper.make_node("Cast", [source], [f"{name}_wide"], name=f"{name}_wide", to=TensorProto.FLOAT)
        return [wide, helper.make_node("Max", [f"{name}_wide"], [name], name=name)]
    graph.initializer.append(helper.make_tensor(f"{name}_bits", dtype, [], [_all_bits(dtype)]))
    return [helper.make_node("BitwiseAnd", [source, f"{name}_bits"], [name], name=name)]


def _all_bits(dtype: int) -> int:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    return (1 << 8 * kind.itemsize) - 1 if kind.kind == "u" else -1


# Reciprocals by division, on processors of ARM.
#
# There ONNX Runtime's kernel approaches a reciprocal step by step: that of a denormal becomes an infinity of
# the wrong sign, which signbit, copysign and atan2 are made of, and others are off by their last bit.


_ONE = "intarsia_one"


def divide_for_reciprocals(net: Network, model: Any) -> None:
    """Replace reciprocals by divisions of 1."""
    dtypes = {tensor.name: tensor.dtype for layer in net.get_layers() for tensor in layer.get_outputs()}
    ones: set[str] = set()
    for node in model.graph.node:
        if node.op_type != "Reciprocal" or node.output[0] not in dtypes:
            continue
        dtype = dtypes[node.output[0]]
        one = f"{_ONE}_{dtype.name}"
        if one not in ones:
            model.graph.initializer.append(helper.make_tensor(one, int(dtype), [], [1.0]))
            ones.add(one)
        node.op_type = "Div"
        node.input.insert(0, one)


# `Where` that keeps the sign of zero: ONNX Runtime's CPU kernel turns a -0.0 of its first choice into 0.0.
#
# The kernel picks what is not zero of two halves, so only what comes third keeps its sign. It is seen in
# what follows: 1 / -0.0, atan2, copysign.
#
# A `Not` of the condition would be taken out again by ONNX Runtime's optimizer, so it is turned round by
# `Xor`.


_SIGNED_ZERO = "intarsia_signed_zero"


def keep_signed_zeros(net: Network, model: Any) -> None:
    """Rewrite every `Where` of floats whose first choice may hold -0.0, so that none is lost."""
    layers = {t.name: layer for layer in net.get_layers() for t in layer.get_outputs()}
    numbers = itertools.count(1)

    def exact(node: NodeProto) -> list[NodeProto]:
        layer = layers.get(node.output[0]) if node.op_type == "Where" else None
        if layer is None or layer.get_outputs(0)[0].dtype not in dtypes.FLOATS:
            return [node]
        condition, first, second = layer.get_inputs()
        assert condition is not None and first is not None and second is not None
        parent = condition.get_parent()
        source, chosen = node.input[0], list(node.input[1:])
        if parent is not None and parent.kind == "Not":  # ONNX Runtime itself takes out such a `Not`
            before = parent.get_inputs(0)[0]
            assert before is not None
            source, chosen, first, second = before.name, chosen[::-1], second, first
        if _holds_none(first.constant):
            return [helper.make_node("Where", [source, *chosen], list(node.output), name=node.name)]
        rewrite = _exchanged if _holds_none(second.constant) else _by_product
        name = f"{_SIGNED_ZERO}_{next(numbers)}"
        return rewrite(name, source, chosen, node, first.dtype, model.graph)

    replace_nodes(model.graph, exact)


def _holds_none(constant: np.ndarray[Any, Any] | None) -> bool:
    """Whether a constant is known, and none of its elements is -0.0."""
    if constant is None:
        return False
    values = np.asarray(constant).astype(np.float64)
    return not bool(np.any((values == 0) & np.signbit(values)))


def _exchanged(
    name: str, source: str, chosen: list[str], node: NodeProto, dtype: ir.DataType, graph: Any
) -> list[NodeProto]:
    """The choices exchanged: the one that may be -0.0 comes third."""
    return [
        _opposite(name, source, graph),
        helper.make_node("Where", [f"{name}_not", chosen[1], chosen[0]], list(node.output), name=node.name),
    ]


def _by_product(
    name: str, source: str, chosen: list[str], node: NodeProto, dtype: ir.DataType, graph: Any
) -> list[NodeProto]:
    """Each choice comes third in a `Where` of its own, beside 1; their product is exact."""
    one = helper.make_tensor(f"{name}_one", int(dtype), [], [1.0])
    graph.initializer.append(one)
    return [
        _opposite(name, source, graph),
        helper.make_node("Where", [f"{name}_not", one.name, chosen[0]], [f"{name}_first"]),
        helper.make_node("Where", [source, one.name, chosen[1]], [f"{name}_second"]),
        helper.make_node("Mul", [f"{name}_first", f"{name}_second"], list(node.output), name=node.name),
    ]


def _opposite(name: str, source: str, graph: Any) -> NodeProto:
    """The negated condition; not by `Not`, which ONNX Runtime would remove and undo."""
    graph.initializer.append(numpy_helper.from_array(np.array(True), f"{name}_true"))
    return helper.make_node("Xor", [source, f"{name}_true"], [f"{name}_not"])


# float16 computed in float32, on processors of ARM.
#
# There ONNX Runtime has kernels that add up in float16: a product of 1024 terms is off by 1 % of its largest
# element, GELU by 6 %, and grouped convolutions are wrong altogether. Elsewhere it has none of them: it casts
# by itself, and rounds where float16 is asked for, not between two layers that compute. So it is done here.


_PREFIX = "intarsia_float"
# fmt: off
# Layers whose result dtype is set by an attribute; those of 8 bits have one kernel everywhere.
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
                self._halves.update(node.output)  # whose type may be unknown
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
        known = {half: result for half, result in self._known.items() if half not in own}
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

    def _cast(self, source: str, result: str, dtype: int) -> str:
        self._nodes.append(
            helper.make_node("Cast", [source], [result], name=f"{_PREFIX}_to_{result}", to=dtype)
        )
        return result


def _is_own(node: NodeProto) -> bool:
    return node.op_type == "Cast" and node.name.startswith(_PREFIX)


def _names(graph: Any, dtype: int | None = None) -> set[str]:
    """The values whose type a graph declares, of one dtype or all."""
    described = [*graph.input, *graph.value_info, *graph.output]
    types = [(one.name, one.type.tensor_type.elem_type) for one in described]
    types += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
    return {name for name, kind in types if dtype is None or kind == dtype}
