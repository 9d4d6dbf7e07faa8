"""Layer attributes: Python values to `onnx_ir.Attr` and back; bodies, the graphs that `If` and `Loop` hold.

ONNX stores floats of attributes in 32 bits. Patterns refuse to put a float64 number into one. Leaving such
layers to PyTorch instead would cut a float64 model at every norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intarsia.errors import NetworkError

_OWNER = "intarsia.owner"  # key of a body's `meta` for the layer that holds it


def to_attr(name: str, value: Any) -> ir.Attr:
    """An attribute with this value; booleans become 0 or 1, since ONNX has none."""
    if isinstance(value, list | tuple):
        kind = ir.AttributeType.FLOATS if any(isinstance(item, float) for item in value) else None
        value = [_plain(item) for item in value]
        kind = kind or (None if value else ir.AttributeType.INTS)
    else:
        kind, value = None, _plain(value)
    try:
        return convenience.convert_attribute(name, value, kind)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"attribute {name}={value!r} has a type that no layer can hold") from error


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) else value  # booleans and dtypes are integers too


def from_attr(attr: ir.Attr) -> Any:
    """The Python value of an attribute."""
    value = attr.value
    return list(value) if isinstance(value, tuple) else value


def is_rounded(number: float, dtype: ir.DataType | None) -> bool:
    """Whether an attribute, which ONNX stores in 32 bits, is less precise than the number in this dtype.

    >>> is_rounded(0.1, ir.DataType.DOUBLE), is_rounded(0.5, ir.DataType.DOUBLE)
    (True, False)
    """
    return dtype == ir.DataType.DOUBLE and float(np.float32(number)) != number


def rounded_attribute(node: ir.Node) -> str | None:
    """The attribute that rounds a number of a float64 layer, as text; None if there is none."""
    if not any(value.dtype == ir.DataType.DOUBLE for value in node.outputs):
        return None
    if node.op_type == "Gelu" and "approximate" in node.attributes:
        return "constants of 32 bits in its definition"
    for name, attr in node.attributes.items():
        numbers = {ir.AttributeType.FLOAT: [attr.value], ir.AttributeType.FLOATS: attr.value}.get(
            attr.type, ()
        )
        if any(is_rounded(number, ir.DataType.DOUBLE) for number in numbers):
            return f"{name}={attr.value} in 32 bits"
    return None


# Bodies: the graphs that layers hold, and the outer values that they read.


class OuterUse(NamedTuple):
    """A layer inside a body reads a value from outside it."""

    node: ir.Node
    position: int
    value: ir.Value


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a layer."""
    graphs: list[ir.Graph] = []
    for attr in node.attributes.values():
        if attr.type is ir.AttributeType.GRAPH:
            graphs.append(attr.value)
        elif attr.type is ir.AttributeType.GRAPHS:
            graphs += attr.value
    return graphs


def take_bodies(node: ir.Node, *, only_free: bool = False) -> list[tuple[ir.Graph, ir.Node | None]]:
    """Make a layer the owner of its bodies; returns each body with its former owner.

    With `only_free`, a body that has an owner keeps it.
    """
    former = [(body, body.meta.get(_OWNER)) for body in bodies_of(node)]
    for body, owner in former:
        if owner is None or not only_free:
            body.meta[_OWNER] = node
    return former


def give_body(body: ir.Graph, owner: ir.Node | None) -> None:
    """Set the owner of a body; None for no owner."""
    body.meta[_OWNER] = owner


def outer_uses(node: ir.Node, *, owned: bool = False) -> tuple[OuterUse, ...]:
    """The values from outside that the bodies of a layer read.

    With `owned`, bodies whose owner is another layer of a graph are left out.
    """
    uses: list[OuterUse] = []
    for body in bodies_of(node):
        holder = body.meta.get(_OWNER) or node
        if owned and holder is not node and holder.graph is not None:
            continue
        inner = list(body.all_nodes())
        graphs = {body, *(one.graph for one in inner)}
        for one in inner:
            for index, value in enumerate(one.inputs):
                if value is not None and value.graph not in graphs:
                    uses.append(OuterUse(one, index, value))
    return tuple(uses)


def owner_in(graph: ir.Graph, inner: ir.Node) -> ir.Node | None:
    """The layer of a graph in whose body, at any depth, a layer is."""
    holder: ir.Node | None = inner
    while holder is not None and holder.graph is not graph:
        holder = None if holder.graph is None else holder.graph.meta.get(_OWNER)
    if holder is not None:
        return holder
    for node in graph:  # bodies of a graph that was made elsewhere have no owner
        if any(inner in body.all_nodes() for body in bodies_of(node)):
            return node
    return None
