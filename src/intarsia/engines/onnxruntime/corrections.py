"""Replacements of layers that ONNX Runtime computes wrongly: casts, signed zeros, reciprocals, float16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper

from intarsia.cache.machine import is_arm
from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.ops import KEEPS_VALUES, MOVES_DATA

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


# Those that hold less than what is cast to them may.
_SHORT = frozenset(
    {
        ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8,
        ir.DataType.UINT32, ir.DataType.UINT16, ir.DataType.UINT8,
    }
)  # fmt: skip


def _is_of_bytes(cast: Layer) -> bool:
    """Whether floats must become 64 bits before they become bytes."""
    (x,), to = cast.get_inputs(0), cast.get_outputs(0)[0].dtype
    wide = dtypes.FLOATS if is_arm() else {ir.DataType.DOUBLE}
    return to == ir.DataType.UINT8 and x is not None and x.constant is None and x.dtype in wide


def _follows_cast(cast: Layer) -> bool:
    """Whether it is the second of two casts in a row, the first of which may take something away."""
    before = _maker(cast)
    # ONNX Runtime may take such layers out, and then two casts are neighbours.
    while before is not None and before.kind in KEEPS_VALUES:
        before = _maker(before)
    if before is None or before.kind != "Cast":
        return False
    middle, to = before.get_outputs(0)[0].dtype, cast.get_outputs(0)[0].dtype
    loses = (to, middle) == (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return loses or (to in _SHORT and middle != ir.DataType.BOOL)


def _maker(layer: Layer) -> Layer | None:
    x = layer.get_inputs(0)[0]
    return None if x is None else x.get_parent()


def _exact_cast(cast: Layer) -> Tensor:
    (x,) = cast.get_inputs(0)
    assert x is not None
    source = F.cast(x, ir.DataType.INT64) if _is_of_bytes(cast) else x
    return F.op("Cast", _copied(source), to=cast.get_outputs(0)[0].dtype)


def _copied(x: Tensor) -> Tensor:
    """The same numbers by a layer that no optimizer recognizes as one without effect."""
    if x.dtype == ir.DataType.BFLOAT16:  # of which there are no extremes
        x = F.cast(x, ir.DataType.FLOAT)
    if x.dtype in dtypes.FLOATS:
        return F.op("Max", x)
    return F.bitwise_and(x, F.constant(np.array(-1).astype(dtypes.to_numpy(x.dtype))))  # all bits


# Reciprocals by division, on processors of ARM.
#
# There ONNX Runtime's kernel approaches a reciprocal step by step: that of a denormal becomes an infinity of
# the wrong sign, which signbit, copysign and atan2 are made of, and others are off by their last bit.


def _quotient(reciprocal: Layer) -> Tensor:
    (x,) = reciprocal.get_inputs(0)
    assert x is not None
    return F.div(1.0, x)


# `Where` that keeps the sign of zero: ONNX Runtime's CPU kernel turns a -0.0 of its first choice into 0.0.
#
# The kernel picks what is not zero of two halves, so only what comes third keeps its sign. It is seen in
# what follows: 1 / -0.0, atan2, copysign.
#
# A `Not` of the condition would be taken out again by ONNX Runtime's optimizer, so it is turned round by
# `Xor`.


def _choices(where: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The condition and both choices, as ONNX Runtime sees them, which takes out a `Not` of the condition."""
    condition, first, second = where.get_inputs()
    assert condition is not None and first is not None and second is not None
    parent = condition.get_parent()
    if parent is None or parent.kind != "Not":
        return condition, first, second
    (source,) = parent.get_inputs(0)
    assert source is not None
    return source, second, first


def _loses_sign(where: Layer) -> bool:
    if where.get_outputs(0)[0].dtype not in dtypes.FLOATS:
        return False
    _, first, _ = _choices(where)
    return not _holds_none(first.constant)


def _exact_choice(where: Layer) -> Tensor:
    """What may be -0.0 comes third. If both may, each does beside 1, and their product is exact."""
    condition, first, second = _choices(where)
    opposite = F.logical_xor(condition, True)
    if _holds_none(second.constant):
        return F.where(opposite, second, first)
    one = F.constant(1.0, first.dtype)
    return F.mul(F.where(opposite, one, first), F.where(condition, one, second))


def _holds_none(constant: np.ndarray[Any, Any] | None) -> bool:
    """Whether a constant is known, and none of its elements is -0.0."""
    if constant is None:
        return False
    values = np.asarray(constant).astype(np.float64)
    return not bool(np.any((values == 0) & np.signbit(values)))


_EXACT = {"Cast": _exact_cast, "Reciprocal": _quotient, "Where": _exact_choice}


def is_wrong(layer: Layer) -> bool:
    """Whether ONNX Runtime computes a layer wrongly on this processor."""
    if layer.kind == "Cast":
        return _is_of_bytes(layer) or _follows_cast(layer)
    if layer.kind == "Where":
        return _loses_sign(layer)
    return layer.kind == "Reciprocal" and is_arm()


def corrected(net: Network) -> Network:
    """The network; a copy of it if some of its layers have to be replaced."""
    if not any(map(is_wrong, net.get_layers())):
        return net
    return net.with_replaced(is_wrong, lambda layer: _EXACT[layer.kind](layer))


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
