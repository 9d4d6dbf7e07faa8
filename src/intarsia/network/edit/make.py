"""Making and listing nodes at the speed of slots; `order.py` and `remove.py` put in and take out so.

`onnx_ir` spends most of the time of a new node on what its callers here have checked already. The short
way writes exactly the fields `onnx_ir` writes; it is taken only where each class keeps exactly the fields
known here, and a test compares it with the long way. Elsewhere the constructors serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.edit.raw import FAST

Made = tuple[str, ir.DataType, ir.Shape]  # name, type and shape of one output

_NODE = {
    "_attributes",
    "_domain",
    "_graph",
    "_inputs",
    "_metadata",
    "_metadata_props",
    "_name",
    "_op_type",
    "_outputs",
    "_overload",
    "_version",
    "device_configurations",
    "doc_string",
}
_VALUE = {
    "_const_value",
    "_graph",
    "_index",
    "_is_graph_input",
    "_is_graph_output",
    "_is_initializer",
    "_metadata",
    "_metadata_props",
    "_name",
    "_producer",
    "_shape",
    "_type",
    "_uses",
    "doc_string",
}
_LIST = {"_length", "_root", "_value_ids_to_boxes"}
_BOX = {"next", "owning_list", "prev", "value"}
_NAMES = {"_value_counter", "_node_counter", "_value_names", "_node_names"}

_read = ir.Value(name="read")
_sample = ir.Node("", "Relu", [_read], outputs=[ir.Value(name="made", type=ir.TensorType(ir.DataType.FLOAT))])
_listed = ir.Graph([_read], [], nodes=[_sample])
_Usage: Any = type(next(iter(_read.uses())))
_Attributes: Any = type(_sample.attributes)


def _slots(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}


def _known() -> bool:
    """Whether `onnx_ir` keeps of every object just what is written below."""
    if not FAST or not hasattr(_listed, "_name_authority"):
        return False
    nodes: Any = _listed._nodes
    return (
        _slots(ir.Node) == _NODE
        and _slots(ir.Value) == _VALUE
        and _slots(ir.TensorType) == {"_dtype", "denotation"}
        and _slots(type(nodes)) == _LIST
        and _slots(type(nodes._root)) == _BOX
        and vars(_listed._name_authority).keys() == _NAMES
        and vars(_sample.attributes).keys() == {"_owner", "data"}
        and _Usage._fields == ("node", "idx")
    )


SHORT = _known()
Box: Any = type(_listed._nodes._root) if SHORT else None
_new = object.__new__
_tuple = tuple.__new__


class Taken:
    """The names of a network, as `onnx_ir` asks for them before it names something itself."""

    def __init__(self, names: dict[str, int]) -> None:
        self._names = names
        self.grew = not SHORT  # whether nodes may have come to the graph since this was set to false

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        self._names.setdefault(name, 0)
        self.grew = True


def share_names(graph: ir.Graph, names: dict[str, int]) -> Taken:
    """Let a graph give no name that is in `names`, and note there those of the nodes appended to it."""
    taken = Taken(names)
    if SHORT:
        known: Any = graph._name_authority
        known._value_names = known._node_names = taken
    return taken


def make_node(
    domain: str,
    op_type: str,
    inputs: tuple[ir.Value | None, ...],
    attributes: Sequence[ir.Attr],
    outputs: Sequence[Made],
    version: int | None,
    name: str,
    origin: dict[str, str] | None,
) -> ir.Node:
    """A node that reads these tensors and makes new ones; it stands in no graph yet."""
    if not SHORT or domain == "ai.onnx":
        makes = [
            ir.Value(name=name, type=ir.TensorType(dtype), shape=shape) for name, dtype, shape in outputs
        ]
        return ir.Node(
            domain,
            op_type,
            inputs,
            attributes,
            outputs=makes,
            version=version,
            name=name,
            metadata_props=origin,
        )
    node: Any = _new(ir.Node)
    node._name = name
    node._domain = domain
    node._op_type = op_type
    node._inputs = inputs
    if attributes:
        node._attributes = _Attributes(attributes, owner=node)
    else:
        node._attributes = empty = _new(_Attributes)
        empty._owner = node
        empty.data = {}
    node._overload = ""
    node._version = version
    node._metadata_props = origin
    node.device_configurations = ()
    node._metadata = node._graph = node.doc_string = None
    values: tuple[ir.Value, ...] = ()
    index = 0
    for name, dtype, shape in outputs:
        value: Any = _new(ir.Value)
        value._producer = node
        value._index = index
        value._name = name
        value._shape = shape
        value._type = kind = _new(ir.TensorType)
        kind._dtype = dtype
        kind.denotation = None
        value._uses = {}
        value._graph = value._metadata = value._metadata_props = value._const_value = value.doc_string = None
        value._is_graph_input = value._is_graph_output = value._is_initializer = False
        values = (*values, value) if index else (value,)
        index += 1  # noqa: SIM113  (enumerate costs as much as the rest)
    node._outputs = values
    index = 0
    for read in inputs:
        if read is not None:
            read._uses[_tuple(_Usage, (node, index))] = None
        index += 1  # noqa: SIM113
    return node  # type: ignore[no-any-return]


def next_of(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """The node behind this one, None at the end; the node itself where that cannot be said."""
    if not SHORT:
        return node
    nodes: Any = graph._nodes
    return nodes._value_ids_to_boxes[id(node)].next.value  # type: ignore[no-any-return]


def nodes_of(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph in order, as they stand now."""
    if not SHORT:
        return list(graph)
    found: list[ir.Node] = []
    root: Any = graph._nodes._root
    box = root.next
    while box is not root:
        found.append(box.value)
        box = box.next
    return found
