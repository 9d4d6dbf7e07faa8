"""What every network must hold, whoever made it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.edit.make import nodes_of

if TYPE_CHECKING:
    from intarsia.network.network import Dim, Network, Shape


def verify(net: Network) -> None:
    """Raise NetworkError at the first thing wrong: order, ownership, uses, names, arity and types."""
    verify_links(net.graph)
    _verify_names(net.graph)
    for node in net.graph:
        verify_layer(node)


def verify_links(
    graph: ir.Graph,
    outside: Collection[ir.Value] = (),
    *,
    nodes: Sequence[ir.Node] | None = None,
    bodies: bool = True,
) -> None:
    """Every layer reads what is made before it, tensors know their readers, outputs are made here.

    `outside` is what a body may read of the graph around it, `nodes` the graph's own if they are at hand;
    without `bodies` none of them is known to hold a graph.
    """
    given: set[Any] = {*graph.inputs, *graph.initializers.values()}
    known = {*outside, *given}
    reads = 0
    uses = sum(len(value._uses) for value in given)
    for node in nodes_of(graph) if nodes is None else nodes:
        index = 0
        for read in node._inputs:
            if read is not None:
                if read not in known:
                    raise NetworkError(f"layer {node.name} reads {read.name} before it is made")
                if (node, index) not in read._uses:
                    raise NetworkError(f"{read.name} does not know that layer {node.name} reads it")
                if read not in outside:
                    reads += 1
            index += 1  # noqa: SIM113  (enumerate costs as much as the rest)
        if bodies and node._attributes.data:
            for attr in node.attributes.values():
                if isinstance(attr.value, ir.Graph):
                    verify_links(attr.value, known)
        for value in node._outputs:
            known.add(value)
            uses += len(value._uses)
    for value in graph.outputs:
        if value not in known:
            raise NetworkError(f"output {value.name} is made by no layer of the network")
    if uses != reads:  # bodies read what stands around them, or a tensor knows of reads that are none
        _verify_uses(known)


def _verify_names(graph: ir.Graph) -> None:
    """Every tensor has a name of its own, a dtype and a shape."""
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


def _verify_uses(known: set[ir.Value]) -> None:
    """Every use a tensor knows of is a read."""
    for value in known:
        for reader, index in value.uses():
            if index >= len(reader.inputs) or reader.inputs[index] is not value:
                raise NetworkError(f"{value.name} believes that layer {reader.name} reads it")


def verify_layer(node: ir.Node) -> None:
    """Arity as the operator has it; dtype and shape of the outputs as its rule infers them."""
    from intarsia.network.attributes import from_attr
    from intarsia.network.infer.registry import has_rule, infer
    from intarsia.network.network import Tensor
    from intarsia.network.schema import schema_of

    inputs = [None if value is None else Tensor.of(value) for value in node.inputs]
    schema = schema_of(node.domain, node.op_type)
    if schema is not None and (why := schema.misfit(node.op_type, inputs)):
        raise NetworkError(f"layer {node.name} {why}")
    if not has_rule(node.domain, node.op_type):
        return
    attributes = {name: from_attr(attr) for name, attr in node.attributes.items()}
    for value, (dtype, shape) in zip(
        node.outputs, infer(node.domain, node.op_type, inputs, attributes, len(node.outputs)), strict=False
    ):
        if value.dtype != dtype:
            raise NetworkError(f"layer {node.name} makes {dtype.name}; {value.name} says {value.dtype}")
        if clash := shape_clash(Tensor.of(value).shape, shape):
            raise NetworkError(f"layer {node.name} makes {value.name} of another shape: {clash}")


def shape_clash(a: Shape, b: Shape) -> str | None:
    """Why two shapes cannot be of one tensor; None if they can. Unknown sizes agree with any."""
    if len(a) != len(b):
        return f"{len(a)} dimensions against {len(b)}"
    for x, y in zip(a, b, strict=True):
        if x != y and isinstance(x, int) and isinstance(y, int):
            return f"{list(a)} against {list(b)}"
    return None


def merged(a: Shape, b: Shape) -> Shape:
    """What is known of a tensor that has both shapes: sizes before symbols before nothing."""

    def better(x: Dim, y: Dim) -> Dim:
        if isinstance(x, int) or y is None:
            return x
        return y if isinstance(y, int) or x is None else x

    return tuple(better(x, y) for x, y in zip(a, b, strict=True))
