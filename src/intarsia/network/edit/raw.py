"""Reading what `onnx_ir` keeps at the speed of a slot, not of a property.

Rewriting asks a node for its inputs, graph and kind hundreds of thousands of times; a property is a
Python call each time. The innermost loops read the slots by name, the others through the functions below.
Where `onnx_ir` keeps these under other names than we know, the names read the properties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter, methodcaller
from typing import Any

import onnx_ir as ir

_NODE = (
    "_inputs",
    "_outputs",
    "_graph",
    "_name",
    "_op_type",
    "_domain",
    "_attributes",
    "device_configurations",
    "_metadata_props",
)
_VALUE = ("_uses", "_producer", "_is_graph_output", "_const_value", "_shape", "_type", "_graph")

FAST = (
    all(hasattr(ir.Node, name) for name in _NODE)
    and all(hasattr(ir.Value, name) for name in _VALUE)
    and hasattr(ir.Graph([], [], nodes=[]), "_nodes")
    and isinstance(getattr(ir.Node("", "Relu", []).attributes, "data", None), dict)
)


def _name_slots() -> None:
    """Let the names that the innermost loops read be there, whatever `onnx_ir` calls them."""
    for name in _NODE:
        if not hasattr(ir.Node, name):
            setattr(ir.Node, name, property(attrgetter(name.removeprefix("_"))))
    for name in ("_const_value", "_shape", "_type", "_graph"):
        if not hasattr(ir.Value, name):
            setattr(ir.Value, name, property(attrgetter(name.removeprefix("_"))))
    for name in ("_uses", "_producer", "_is_graph_output"):
        if not hasattr(ir.Value, name):
            setattr(ir.Value, name, property(methodcaller(name.removeprefix("_"))))
    if not hasattr(ir.Shape, "_frozen"):
        setattr(ir.Shape, "_frozen", property(attrgetter("frozen")))  # noqa: B010
    for kind in (ir.TensorType, ir.SparseTensorType, ir.SequenceType, ir.OptionalType):
        if not hasattr(kind, "_dtype"):
            setattr(kind, "_dtype", property(attrgetter("dtype")))  # noqa: B010
    attributes: Any = type(ir.Node("", "Relu", []).attributes)
    if not hasattr(ir.Node("", "Relu", []).attributes, "data"):
        attributes.data = property(lambda self: self)


_name_slots()


def _get(private: str, public: str) -> Callable[[Any], Any]:
    return attrgetter(private if FAST else public)


inputs_of: Callable[[ir.Node], tuple[ir.Value | None, ...]] = _get("_inputs", "inputs")
outputs_of: Callable[[ir.Node], tuple[ir.Value, ...]] = _get("_outputs", "outputs")
graph_of: Callable[[ir.Node], ir.Graph | None] = _get("_graph", "graph")
name_of: Callable[[ir.Node], str] = _get("_name", "name")
op_type_of: Callable[[ir.Node], str] = _get("_op_type", "op_type")
domain_of: Callable[[ir.Node], str] = _get("_domain", "domain")
attributes_of: Callable[[ir.Node], Any] = _get("_attributes", "attributes")
# The same without the calls that a UserDict makes.
attribute_data: Callable[[ir.Node], Mapping[str, ir.Attr]] = _get("_attributes.data", "attributes")
shape_of: Callable[[ir.Value], ir.Shape | None] = _get("_shape", "shape")
constant_of: Callable[[ir.Value], ir.TensorProtocol | None] = _get("_const_value", "const_value")
type_of: Callable[[ir.Value], Any] = _get("_type", "type")
producer_of: Callable[[ir.Value], ir.Node | None] = (
    attrgetter("_producer") if FAST else methodcaller("producer")
)
reads_of: Callable[[ir.Value], Collection[Any]] = attrgetter("_uses") if FAST else methodcaller("uses")
is_output: Callable[[ir.Value], bool] = (
    attrgetter("_is_graph_output") if FAST else methodcaller("is_graph_output")
)


def kind_of(node: ir.Node) -> str:
    """The operator, with its domain where it is not ONNX's own."""
    domain = domain_of(node)
    return f"{domain}::{op_type_of(node)}" if domain else op_type_of(node)
