"""What must hold for every network."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.attributes import bodies_of, from_attr
from intarsia.network.infer import has_rule, infer
from intarsia.network.value import Dim, Shape, TypedValue


def verify(graph: ir.Graph) -> None:
    """Raise NetworkError at the first violation: order, ownership, uses, names, arity or types."""
    verify_links(graph)
    _verify_names(graph)
    for node in graph:
        verify_layer(node)


def verify_links(graph: ir.Graph) -> None:
    """Check that layers read only earlier values, that uses match inputs, and that outputs are made here."""
    reads: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
    _verify_order(graph, set(), reads)
    for value, readers in reads.items():
        uses = value.uses()
        if len(uses) == 1 and [*uses] == readers:
            continue  # the common case
        if missed := set(readers).difference(uses):
            reader = next(use for use in readers if use in missed)[0]
            raise NetworkError(f"{value.name} does not know that layer {reader.name} reads it")
        for reader, index in uses:
            if index >= len(reader.inputs) or reader.inputs[index] is not value:
                raise NetworkError(f"{value.name} believes that layer {reader.name} reads it")


def _verify_order(
    graph: ir.Graph, outside: set[ir.Value], reads: dict[ir.Value, list[tuple[ir.Node, int]]]
) -> None:
    """Collect who reads what, also in bodies; `outside` are the values around a body, which it may read."""
    defined = {*outside, *graph.inputs, *graph.initializers.values()}
    reads.update((value, []) for value in defined if value not in reads)
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            if value not in defined:
                raise NetworkError(f"layer {node.name} reads {value.name} before it is made")
            reads[value].append((node, index))
        for body in bodies_of(node):
            _verify_order(body, defined, reads)
        for value in node.outputs:
            defined.add(value)
            reads[value] = []
    for value in graph.outputs:
        if value not in defined:
            raise NetworkError(f"output {value.name} is made by no layer of the network")


def _verify_names(graph: ir.Graph) -> None:
    """Check that every tensor has a unique name, a dtype and a shape."""
    names: set[str] = set()
    makers = [("the network", {**dict.fromkeys(graph.inputs), **dict.fromkeys(graph.initializers.values())})]
    makers += [(node.name or "a layer without a name", dict.fromkeys(node.outputs)) for node in graph]
    for maker, values in makers:
        for value in values:
            name = value.name
            if not name:
                raise NetworkError(f"{maker} makes a tensor without a name")
            if name in names:
                raise NetworkError(f"{maker} makes {name}, a name already taken")
            if value.type is None or value.shape is None:
                raise NetworkError(f"{maker} makes {name} without dtype or shape")
            names.add(name)
    for node in graph:
        for attr in node.attributes.values():
            if isinstance(attr.value, ir.Graph):
                _verify_names(attr.value)


def verify_layer(node: ir.Node) -> None:
    """Check the arity of a layer, and the dtypes and shapes of its outputs, by the operator's definition."""
    inputs = [None if value is None else TypedValue(value) for value in node.inputs]
    if not has_rule(node.domain, node.op_type):
        return
    attributes = {name: from_attr(attr) for name, attr in node.attributes.items()}
    for value, (dtype, shape) in zip(
        node.outputs, infer(node.domain, node.op_type, inputs, attributes, len(node.outputs)), strict=False
    ):
        if value.dtype != dtype:
            raise NetworkError(f"layer {node.name} makes {dtype.name}; {value.name} says {value.dtype}")
        if clash := shape_clash(TypedValue(value).shape, shape):
            raise NetworkError(f"layer {node.name} makes {value.name} of another shape: {clash}")


def shape_clash(a: Shape, b: Shape) -> str | None:
    """Why two shapes cannot belong to one tensor; None if they can. Unknown sizes agree with all."""
    if len(a) != len(b):
        return f"{len(a)} dimensions against {len(b)}"
    for x, y in zip(a, b, strict=True):
        if x != y and isinstance(x, int) and isinstance(y, int):
            return f"{list(a)} against {list(b)}"
    return None


def merged(a: Shape, b: Shape) -> Shape:
    """The shape of a tensor that has both shapes: integers before symbols, symbols before unknown sizes."""

    def better(x: Dim, y: Dim) -> Dim:
        if isinstance(x, int) or y is None:
            return x
        return y if isinstance(y, int) or x is None else x

    return tuple(better(x, y) for x, y in zip(a, b, strict=True))
