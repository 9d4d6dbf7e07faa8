"""What counts as equal when a pattern is matched: numbers, attributes, layers that change nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.network import Tensor
from intarsia.network.ops import MAY_BE_IDENTITY
from intarsia.network.schema import schema_of
from intarsia.rewrite.term import AnyValue, OpTerm


def holds(value: ir.Value, number: float) -> bool:
    """Whether a tensor is a constant of one element, equal to `number` as far as its dtype tells."""
    array = value.const_value
    if array is None or array.size != 1:
        return False
    has = float(np.asarray(array.numpy()).astype(np.float64).ravel()[0])
    if array.dtype.is_integer() or number in (0.0, 1.0, 2.0, 0.5):
        return has == number
    tolerance = {ir.DataType.FLOAT16: 1e-3, ir.DataType.BFLOAT16: 8e-3}.get(array.dtype, 1e-6)
    return abs(has - number) <= tolerance * abs(number)


def is_transparent(node: ir.Node) -> bool:
    """Whether a layer hands on its first input unchanged."""
    op_type = node.op_type
    if op_type not in MAY_BE_IDENTITY or node.domain or not node.inputs or node.inputs[0] is None:
        return False
    if op_type == "Identity":
        return True
    source, result = node.inputs[0], node.outputs[0]
    if op_type == "Cast":
        return source.dtype == result.dtype
    if op_type in ("Reshape", "Expand", "Flatten"):
        if source.shape is None or result.shape is None:
            return False
        a, b = Tensor.of(source).shape, Tensor.of(result).shape
        # With one size unknown the others fix it for Reshape; it is then the same on both sides.
        return a == b and (None not in a or (op_type == "Reshape" and a.count(None) == 1 and 0 not in a))
    order = node.attributes.get("perm")  # of a Transpose
    return order is not None and list(order.value) == list(range(len(order.value)))


def see_through(value: ir.Value | None) -> ir.Value | None:
    """The tensor behind layers that change nothing."""
    while value is not None and (node := value.producer()) is not None and is_transparent(node):
        value = node.inputs[0]
    return value


@functools.cache
def _defaults(domain: str, op_type: str) -> dict[str, Any]:
    schema = schema_of(domain, op_type)
    return {} if schema is None else schema.defaults


def odd_attribute(term: OpTerm, node: ir.Node) -> tuple[Any, ...] | None:
    """The first attribute that is not what the pattern asks for: a message and its parts, or None."""
    wanted, attributes = term.attributes, node.attributes
    if not wanted and not attributes:
        return None
    defaults = _defaults(node.domain, node.op_type)
    rank = _rank(node)
    for name, value in wanted.items():
        attr = attributes.get(name)
        has = defaults.get(name) if attr is None else attr.value
        if not _agrees(name, value, has, rank):
            asked = "what it should be" if callable(value) else repr(value)
            return ("{} of {} is {}, not {}", name, node, plain(has), asked)
    if term.any_attributes:
        return None
    for name, attr in attributes.items():
        if name not in wanted and not _agrees(name, defaults.get(name), attr.value, rank):
            return ("{} has {}={!r}, which the pattern does not mention", node, name, plain(attr.value))
    return None


def _agrees(name: str, wanted: Any, has: Any, rank: int) -> bool:
    if isinstance(wanted, AnyValue):
        return True
    has = plain(has)
    if callable(wanted):
        return bool(wanted(has))
    if name == "axis" and isinstance(wanted, int) and isinstance(has, int) and rank:
        return wanted % rank == has % rank
    if isinstance(wanted, float) and isinstance(has, float):
        return abs(wanted - has) <= 1e-6 * abs(wanted)
    return bool(plain(wanted) == has)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rank(node: ir.Node) -> int:
    first = node.inputs[0] if node.inputs else None
    return 0 if first is None or first.shape is None else len(first.shape)
