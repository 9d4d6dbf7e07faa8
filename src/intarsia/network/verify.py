"""What every network must hold, whoever made it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.make import nodes_of

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
    known: set[Any] = {None, *outside, *graph.inputs, *graph.initializers.values()}
    knows, reads = known.issuperset, 0
    for node in nodes_of(graph) if nodes is None else nodes:
        inputs = node._inputs
        if not knows(inputs):
            unknown: Any = next(value for value in inputs if value not in known)
            raise NetworkError(f"layer {node.name} reads {unknown.name} before it is made")
        reads += len(inputs)
        if bodies and node._attributes.data:
            for attr in node.attributes.values():
                if isinstance(attr.value, ir.Graph):
                    verify_links(attr.value, known)
        known.update(node._outputs)
    for value in graph.outputs:
        if value not in known:
            raise NetworkError(f"output {value.name} is made by no layer of the network")
    known.discard(None)
    _verify_uses(graph, known, reads)


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


def _verify_uses(graph: ir.Graph, known: set[ir.Value], reads: int) -> None:
    """Every use a tensor knows of is a read, and there are as many of one as of the other."""
    uses = 0
    for value in known:
        read_by = value._uses
        uses += len(read_by)
        for node, index in read_by:
            try:
                if node._inputs[index] is value:
                    continue
            except IndexError:
                pass
            raise NetworkError(f"{value.name} believes that layer {node.name} reads it")
    if uses != reads:
        # Positions left out are no reads, and bodies read what stands around them.
        reads = sum(value is not None for node in graph for value in node.inputs)
        uses = sum(use.node.graph is graph for value in known for use in value.uses())
    if uses != reads:
        raise NetworkError(f"layers read {reads} tensors and tensors know of {uses} reads")


def verify_layer(node: ir.Node) -> None:
    """Arity as the operator has it; dtype and shape of the outputs as its rule infers them."""
    from intarsia.network.attributes import from_attr
    from intarsia.network.infer import has_rule, infer
    from intarsia.network.network import Tensor
    from intarsia.network.schema import schema_of

    schema = schema_of(node.domain, node.op_type)
    if schema is not None and not schema.min_inputs <= len(node.inputs) <= schema.max_inputs:
        raise NetworkError(
            f"layer {node.name} has {len(node.inputs)} inputs; {node.op_type} takes"
            f" {schema.min_inputs} to {schema.max_inputs}"
        )
    if not has_rule(node.domain, node.op_type):
        return
    inputs = [None if value is None else Tensor.of(value) for value in node.inputs]
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
