"""The layer network an engine is built from: `Network`, `Layer` and `Tensor`, thin views over `onnx_ir`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from intarsia.errors import NetworkError
from intarsia.network import dtypes
from intarsia.network.attributes import from_attr
from intarsia.network.edit.graph import EditableGraph
from intarsia.network.edit.redirect import mark_output, remove_node, replace_input, replace_value
from intarsia.network.text import dot_text, graph_text, kind_of, layer_text
from intarsia.network.value import OPSET, Dim, Shape, TypedValue, ir_version
from intarsia.network.verify import verify

_NETWORK = "intarsia.network"  # key of a graph's `meta` for its network


class Tensor(TypedValue):
    """A value of a network: an input, a constant, or a result of a layer.

    `Tensor(name=..., dtype=..., shape=...)` adds an input to the network under guard.

    >>> from intarsia.network import Network, Tensor, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     a = Tensor("a", torch.float32, (2, "n"))
    ...     (a + 1.0).mark_output("b")
    >>> print(net)
    network(a: f32[2, n]) -> (b: f32[2, n])
      b = Add(a, 1.0)
    """

    __slots__ = ()

    def __init__(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> None:
        super().__init__(default_net().add_input(name, dtype, shape).value)

    @staticmethod
    def of(value: ir.Value) -> Tensor:
        """The `Tensor` of an `onnx_ir` value."""
        view = Tensor.__new__(Tensor)
        view.value = value
        return view

    @property
    def network(self) -> Network:
        graph = self.value.graph
        if graph is None:
            raise NetworkError(f"tensor {self.name} belongs to no network")
        return Network.of(graph)

    def get_parent(self) -> Layer | None:
        """The layer that computes this tensor; None for inputs and constants."""
        producer = self.value.producer()
        return None if producer is None else Layer(producer)

    def get_users(self) -> list[Layer]:
        """The layers that read this tensor, each once, in order of use."""
        return [Layer(node) for node in self.value.consumers()]

    def is_output(self) -> bool:
        return self.value.is_graph_output()

    def is_input(self) -> bool:
        return self.value.is_graph_input()

    def mark_output(self, name: str | None = None) -> None:
        """Make this tensor an output of its network."""
        default_net(self).mark_output(self, name)

    def replace_all_uses_with(self, new: Tensor) -> None:
        """Replace this tensor by `new` in all its users and in the outputs of the network."""
        self.network.replace_all_uses(self, new)

    # `functional` adds the operators, since they add layers.
    if TYPE_CHECKING:

        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __invert__(self) -> Tensor: ...


class Layer:
    """One operation of a network."""

    __slots__ = ("node",)

    def __init__(self, node: ir.Node) -> None:
        self.node: ir.Node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)

    def __repr__(self) -> str:
        return f"Layer({layer_text(self.node)})"

    @property
    def name(self) -> str:
        return self.node.name or ""

    @property
    def kind(self) -> str:
        """The operator: `Add`, or `com.microsoft::BiasGelu` for another domain."""
        return kind_of(self.node)

    @property
    def network(self) -> Network:
        graph = self.node.graph
        if graph is None:
            raise NetworkError(f"layer {self.name} was removed from its network")
        return Network.of(graph)

    def as_layer(self) -> ir.Node:
        """The raw `onnx_ir` node."""
        return self.node

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value."""
        attr = self.node.attributes.get(name)
        return default if attr is None else from_attr(attr)

    def get_inputs(self, *indices: int) -> list[Tensor | None]:
        """The inputs at these positions, or all of them. A missing optional input is None."""
        values = self.node.inputs if not indices else [self.node.inputs[i] for i in indices]
        return [None if value is None else Tensor.of(value) for value in values]

    def get_outputs(self, *indices: int) -> list[Tensor]:
        """The outputs at these positions, or all."""
        values = self.node.outputs if not indices else [self.node.outputs[i] for i in indices]
        return [Tensor.of(value) for value in values]

    def replace_input(self, index: int, new: Tensor) -> None:
        """Replace the input at this position by `new`, for this layer only."""
        self.network.replace_use(self, index, new)

    def mark_as_removed(self) -> None:
        """Remove this layer from its network. Nothing may read its results any more."""
        if self.node.graph is not None:
            self.network.remove(self)

    def is_removed(self) -> bool:
        return self.node.graph is None


class Network(EditableGraph):
    """A graph of layers from which an engine builds a program.

    >>> net = Network("tiny")
    >>> with net_guard(net):
    ...     (Tensor("a", torch.float32, (3,)) * 2.0).mark_output("y")
    >>> [layer.kind for layer in net.get_layers()]
    ['Mul']
    """

    def __init__(
        self, name: str = "network", *, graph: ir.Graph | None = None, within: Network | None = None
    ) -> None:
        super().__init__(graph or ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name), within)
        self.graph.meta[_NETWORK] = self

    @staticmethod
    def of(graph: ir.Graph) -> Network:
        """The network of an `onnx_ir` graph. It is created if the graph has none."""
        network = graph.meta.get(_NETWORK)
        if isinstance(network, Network) and network.graph is graph:
            return network
        net, seen = Network(graph=graph), set[str | None]()
        for node in graph:
            if node.name is None or node.name in seen:
                node.name = net.unique_name(node.name or node.op_type.lower())
            seen.add(node.name)
        return net

    @property
    def name(self) -> str:
        return self.graph.name or "network"

    def __str__(self) -> str:
        return graph_text(self.graph)

    def __len__(self) -> int:
        return len(self.graph)

    def get_inputs(self) -> list[Tensor]:
        return [Tensor.of(value) for value in self.graph.inputs]

    def get_outputs(self) -> list[Tensor]:
        return [Tensor.of(value) for value in self.graph.outputs]

    def get_layers(self) -> Iterator[Layer]:
        """The layers in order. You may edit the network while you iterate."""
        return (Layer(node) for node in self.graph)

    def get_layer_by_name(self, name: str) -> Layer | None:
        node = self.node_named(name)
        return None if node is None else Layer(node)

    def is_quantized(self) -> bool:
        """Whether any layer reads quantized values."""
        return any(node.op_type == "DequantizeLinear" for node in self.graph)

    def is_input(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_input() and tensor.value.graph is self.graph

    def is_output(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_output() and tensor.value.graph is self.graph

    def add_input(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> Tensor:
        wanted = dtypes.to_onnx(dtype) if isinstance(dtype, torch.dtype) else dtype
        return Tensor.of(self.new_input(name, wanted, tuple(shape)))

    def add_constant(self, array: ir.TensorProtocol, name: str | None = None) -> Tensor:
        """Add a constant. Small equal constants are shared."""
        return Tensor.of(self.new_constant(array, name))

    def add_layer(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[tuple[ir.DataType, Shape]],
        domain: str = "",
        version: int | None = None,
        name: str | None = None,
    ) -> Layer:
        """Append a layer whose outputs have these types and shapes; inside `before`, insert it."""
        values = [None if tensor is None else tensor.value for tensor in inputs]
        node = self.new_node(op_type, values, attributes, outputs, domain=domain, version=version, name=name)
        return Layer(node)

    @contextlib.contextmanager
    def before(self, layer: Layer) -> Iterator[None]:
        """In the `with` block, new layers are inserted before `layer`."""
        outer, self.anchor = self.anchor, layer.node
        try:
            yield
        finally:
            self.anchor = outer

    def mark_output(self, tensor: Tensor, name: str | None = None) -> None:
        """Make a tensor an output with this name. An input, or an output with a name, keeps its name."""
        mark_output(self, tensor.value, name)

    def remove(self, layer: Layer) -> None:
        """Remove a layer; NetworkError if something still reads it."""
        remove_node(self, layer.node)

    def replace_all_uses(self, old: Tensor, new: Tensor) -> None:
        """Replace `old` by `new` in layers and in the network's outputs; NetworkError if that makes a cycle.

        Outputs keep their names: `new` gets the name, or an Identity of `new` does if `new` is an input, a
        constant or an output already.
        """
        replace_value(self, old.value, new.value)

    def replace_use(self, layer: Layer, index: int, new: Tensor) -> None:
        """Replace one input of a layer; NetworkError if that makes a cycle."""
        replace_input(self, layer.node, index, new.value)

    def with_replaced(
        self, is_old: Callable[[Layer], bool], new_result: Callable[[Layer], Tensor]
    ) -> Network:
        """A copy in which other layers compute what some of one output did; tensors keep their names."""
        copy = Network.of(self.graph.clone())
        for layer in filter(is_old, list(copy.get_layers())):
            (old,) = layer.get_outputs()
            name, shape = old.name, old.value.shape
            with net_guard(copy), copy.before(layer):
                new = new_result(layer)
            copy.replace_all_uses(old, new)
            copy.remove(layer)
            new.value.name, new.value.shape = name, shape
        copy.drop_unused_constants()
        return copy

    def to_dot(self, path: str | os.PathLike[str] | None = None) -> str:
        """The network as a Graphviz drawing, written to `path` if one is given."""
        text = dot_text(self.graph)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The network as an `onnx.ModelProto`, saved to `path` if one is given."""
        model = ir.Model(self.graph, ir_version=ir_version(self.graph), producer_name="intarsia")
        if path is not None:
            ir.save(model, path)
        return ir.to_proto(model)

    def verify(self) -> None:
        """Raise NetworkError if the network is invalid."""
        verify(self.graph)


class _ThreadState(threading.local):
    net: Network | None = None


under_guard: _ThreadState = _ThreadState()  # the network that functionals of this thread add layers to


@contextlib.contextmanager
def net_guard(net: Network) -> Iterator[Network]:
    """In the `with` block, functionals of this thread add their layers to `net`."""
    outer, under_guard.net = under_guard.net, net
    try:
        yield net
    finally:
        under_guard.net = outer


def default_net(*tensors: Any) -> Network:
    """The network under `net_guard`; without one, the network of the tensors."""
    if under_guard.net is not None:
        return under_guard.net
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return tensor.network
    raise NetworkError("no network is under guard; open one with `with net_guard(net):`")
