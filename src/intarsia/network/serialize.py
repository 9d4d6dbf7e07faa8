"""A network as an ONNX model: small constants are part of it, large weights stay where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.network.network import Network
from intarsia.network.value import ir_version

INLINE_BYTES = 1024  # engines read shapes and axes while they build, so these must be part of the model

_serializing = threading.Lock()

Weights = dict[str, ir.TensorProtocol]


def to_proto(net: Network, *, weights_outside: bool = True) -> tuple[Any, Weights]:
    """The model, and the weights that it names but does not hold.

    A weight outside is external data whose location is its own name. The engine provides its memory.
    """
    outside: Weights = {}
    # The network has stand-ins for its weights only while it is serialized.
    with _serializing:
        try:
            for name, value in net.graph.initializers.items():
                array = value.const_value
                if not weights_outside or array is None or array.nbytes <= INLINE_BYTES:
                    continue
                outside[name] = array
                shape = ir.Shape(list(array.shape))  # type: ignore[arg-type]
                value.const_value = ir.ExternalTensor(
                    name, 0, array.nbytes, array.dtype, shape=shape, name=name
                )
            proto = ir.serde.serialize_model(ir.Model(net.graph, ir_version=ir_version(net.graph)))
        finally:
            for name, array in outside.items():
                net.graph.initializers[name].const_value = array
    # A constant without readers, which a converter may have folded into another, is left out.
    unread = {name for name, value in net.graph.initializers.items() if not _is_read(value)}
    drop_initializers(proto.graph, unread)
    return proto, {name: array for name, array in outside.items() if name not in unread}


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def weights_as_inputs(proto: Any, weights: Weights) -> None:
    """Turn the weights that a model does not hold into inputs."""
    graph = proto.graph
    drop_initializers(graph, weights)
    for name, array in weights.items():
        value_info = graph.input.add()
        value_info.name = name
        value_info.type.tensor_type.elem_type = int(array.dtype)
        for size in array.shape:
            value_info.type.tensor_type.shape.dim.add().dim_value = int(size)  # type: ignore[arg-type]


def drop_initializers(graph: Any, names: Collection[str]) -> None:
    """Remove the constants of these names from the graph of a model."""
    if names:
        others = [tensor for tensor in graph.initializer if tensor.name not in names]
        del graph.initializer[:]
        graph.initializer.extend(others)


def replace_nodes(graph: Any, replacement: Callable[[Any], Sequence[Any]]) -> None:
    """Put other nodes, which may include it, in the place of each node of the graph of a model."""
    nodes = [new for node in graph.node for new in replacement(node)]
    del graph.node[:]
    graph.node.extend(nodes)
