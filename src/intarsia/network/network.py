"""Network, Layer and Tensor: thin views over an `onnx_ir` graph, its nodes and its values."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.errors import NetworkError
from intarsia.network import dtypes
from intarsia.network.attributes import from_attr, to_attr
from intarsia.network.journal import Added, Constant, Edit, Given, Marked, Moved, Redirected, Removed
from intarsia.network.make import Made, insert_before, make_node, take_out
from intarsia.network.order import Order
from intarsia.network.raw import graph_of, inputs_of, is_output, name_of, producer_of, shape_of, type_of
from intarsia.network.uses import is_dead, move_uses, uses_of

if TYPE_CHECKING:
    from intarsia.network.signature import FLayerInfo, FLayerInfoMemo

Dim = int | str | None  # a size, a symbol such as "s0" or "2*s0", or unknown
Shape = tuple[Dim, ...]
OPSET = 23
MICROSOFT = "com.microsoft"

_guards = threading.local()
_lower = functools.cache(str.lower)
_tuple = tuple.__new__  # a named tuple without the call of its own constructor


class _Calls(threading.local):
    made: list[ir.Node] | None = None
    net: Network | None = None


calls = _Calls()  # the layers made by the functional that runs now in this thread, and their network

# Equal shapes are one frozen object; its dimensions as plain values are found by identity.
_shapes: dict[Shape, ir.Shape] = {}
_dims: dict[int, Shape] = {}


def raw_shape(dims: Shape) -> ir.Shape:
    """The shared, frozen `onnx_ir` shape of these sizes."""
    found = _shapes.get(dims)
    if found is None:
        dims = tuple(dim if dim is None or isinstance(dim, str) else int(dim) for dim in dims)
        found = _shapes[dims] = ir.Shape(dims, frozen=True)
        _dims[id(found)] = dims
    return found


class Tensor:
    """A value of a network: what a layer makes or a network is given.

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

    __slots__ = ("value",)
    value: ir.Value

    def __init__(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> None:
        self.value = default_net().add_input(name, dtype, shape).value

    @staticmethod
    def of(value: ir.Value) -> Tensor:
        """The view of a raw value."""
        view = object.__new__(Tensor)
        view.value = value
        return view

    # A view has no identity of its own: two views of one value are one tensor.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        from intarsia.network.text import type_text

        return f"Tensor({self.name}: {type_text(self.value)})"

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def dtype(self) -> ir.DataType:
        kind = type_of(self.value)
        if kind is None:
            raise NetworkError(f"tensor {self.name} has no dtype")
        return kind.dtype  # type: ignore[no-any-return]

    @property
    def shape(self) -> Shape:
        shape = shape_of(self.value)
        known = _dims.get(id(shape))
        if known is not None:
            return known
        if shape is None:
            raise NetworkError(f"tensor {self.name} has no shape")
        return tuple(d if isinstance(d, int) else d.value for d in shape)

    @property
    def ndim(self) -> int:
        return len(self.value.shape) if self.value.shape is not None else len(self.shape)

    @property
    def network(self) -> Network:
        graph = self.value.graph
        if graph is None:
            raise NetworkError(f"tensor {self.name} belongs to no network")
        return Network.of(graph)

    @property
    def constant(self) -> np.ndarray[Any, Any] | None:
        """The value, where it is known when the network is made."""
        found = self.value.const_value
        return None if found is None else found.numpy()

    def get_parent(self) -> Layer | None:
        """The layer that makes this tensor; None for inputs and constants."""
        producer = self.value.producer()
        return None if producer is None else Layer(producer)

    def get_users(self) -> list[Layer]:
        """The layers that read this tensor, each once, in order of use."""
        return [Layer(node) for node in dict.fromkeys(use.node for use in self.value.uses())]

    def is_output(self) -> bool:
        return self.value.is_graph_output()

    def is_input(self) -> bool:
        return self.value.is_graph_input()

    def mark_output(self, name: str | None = None) -> None:
        """Make this tensor an output of its network."""
        default_net(self).mark_output(self, name)

    def replace_all_uses_with(self, new: Tensor) -> None:
        """Let every reader of this tensor, and the network's outputs, read `new` instead."""
        self.network.replace_all_uses(self, new)

    # Operators are filled in by functional.py, which knows the operations.
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
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self.node is other.node

    def __hash__(self) -> int:
        return id(self.node)

    def __repr__(self) -> str:
        from intarsia.network.text import layer_text

        return f"Layer({layer_text(self.node)})"

    @property
    def name(self) -> str:
        return self.node.name or ""

    @property
    def kind(self) -> str:
        """The operator: `Add`, or `com.microsoft::BiasGelu` outside ONNX's own domain."""
        node = self.node
        return f"{node.domain}::{node.op_type}" if node.domain else node.op_type

    @property
    def network(self) -> Network:
        graph = graph_of(self.node)
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
        """The inputs at these positions, or all; an input left out is None."""
        values = self.node.inputs if not indices else [self.node.inputs[i] for i in indices]
        return [None if value is None else Tensor.of(value) for value in values]

    def get_outputs(self, *indices: int) -> list[Tensor]:
        """The outputs at these positions, or all."""
        values = self.node.outputs if not indices else [self.node.outputs[i] for i in indices]
        return [Tensor.of(value) for value in values]

    def replace_input(self, index: int, new: Tensor) -> None:
        """Let this layer alone read `new` at this position."""
        self.network.replace_use(self, index, new)

    def mark_as_removed(self) -> None:
        """Take this layer out of its network; nothing may read it any more."""
        if self.node.graph is not None:
            self.network.remove(self)

    def is_removed(self) -> bool:
        return self.node.graph is None


class Network:
    """A graph of layers that an engine is built from.

    >>> net = Network("tiny")
    >>> with net_guard(net):
    ...     (Tensor("a", torch.float32, (3,)) * 2.0).mark_output("y")
    >>> [layer.kind for layer in net.get_layers()]
    ['Mul']
    """

    def __init__(self, name: str = "network") -> None:
        self._own(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name))

    def _own(self, graph: ir.Graph) -> None:
        self.graph = graph
        graph.meta["intarsia.network"] = self
        self.memo: FLayerInfoMemo | None = None
        self.order = Order(graph)
        self.journal: list[Edit] | None = None  # kept while a rewrite is tried
        self._layers: dict[str, ir.Node] = {}
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        self.anchor: ir.Node | None = None
        self.scope = ""  # how layers made now are called
        self.traced = False  # whether any layer knows where it comes from
        self.origin: dict[str, str] | None = None  # where they come from: module path, source line

    @staticmethod
    def of(graph: ir.Graph) -> Network:
        """The network a raw graph belongs to, made on first sight for a graph made elsewhere."""
        guarded: list[Network] | None = _guards.__dict__.get("stack")
        if guarded and guarded[-1].graph is graph:  # by far the most often asked for
            return guarded[-1]
        found = graph.meta.get("intarsia.network")
        if isinstance(found, Network):
            return found
        net = object.__new__(Network)
        net._own(graph)
        for value in (*graph.inputs, *graph.initializers.values()):
            net._names[str(value.name)] = 0
        for node in graph:
            node.name = net.unique_name(node.name or node.op_type.lower())
            net._layers[node.name] = node
            for value in node.outputs:
                net._names.setdefault(str(value.name), 0)
        return net

    @property
    def name(self) -> str:
        return self.graph.name or "network"

    def __str__(self) -> str:
        from intarsia.network.text import network_text

        return network_text(self)

    def __len__(self) -> int:
        return len(self.graph)

    def get_inputs(self) -> list[Tensor]:
        return [Tensor.of(value) for value in self.graph.inputs]

    def get_outputs(self) -> list[Tensor]:
        return [Tensor.of(value) for value in self.graph.outputs]

    def get_layers(self) -> Iterator[Layer]:
        """The layers in order; safe against edits made while iterating."""
        return (Layer(node) for node in self.graph)

    def get_layer_by_name(self, name: str) -> Layer | None:
        node = self._layers.get(name)
        return None if node is None else Layer(node)

    def is_input(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_input() and tensor.value.graph is self.graph

    def is_output(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_output() and tensor.value.graph is self.graph

    def unique_name(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2`, ... if taken."""
        count = self._names.get(hint)
        if count is None:
            self._names[hint] = 0
            return hint
        while True:
            count += 1
            name = f"{hint}_{count}"
            if name not in self._names:
                self._names[hint] = count
                self._names[name] = 0
                return name

    def add_input(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> Tensor:
        value = ir.Value(
            name=self.unique_name(name), type=ir.TensorType(_onnx_dtype(dtype)), shape=raw_shape(tuple(shape))
        )
        self.graph.inputs.append(value)
        if self.journal is not None:
            self.journal.append(Given(value))
        return Tensor.of(value)

    def add_constant(self, array: ir.TensorProtocol, name: str | None = None) -> Tensor:
        """A constant; small equal ones are shared."""
        shape = tuple(int(d) for d in array.shape)  # type: ignore[arg-type]
        key = (array.dtype, shape, array.tobytes()) if array.nbytes <= 64 and name is None else None
        if key is not None and (found := self._constants.get(key)) is not None:
            return Tensor.of(found)
        value = ir.Value(
            name=self.unique_name(name or "const"),
            type=ir.TensorType(array.dtype),
            shape=raw_shape(shape),
            const_value=array,
        )
        self.graph.register_initializer(value)
        if key is not None:
            self._constants[key] = value
        if self.journal is not None:
            self.journal.append(Constant(value, key))
        return Tensor.of(value)

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
        inferred: bool = False,
    ) -> Layer:
        """Append (or, under `before`, insert) a layer whose outputs have these types and shapes.

        `inferred` says that the types come from the operator's own rule and need no second look.
        """
        values = tuple([None if tensor is None else tensor.value for tensor in inputs])
        return Layer(self.add_node(op_type, values, attributes, outputs, domain, version, name, inferred))

    def add_node(
        self,
        op_type: str,
        inputs: tuple[ir.Value | None, ...],
        attributes: Mapping[str, Any] | None,
        outputs: Sequence[tuple[ir.DataType, Shape]],
        domain: str,
        version: int | None = None,
        name: str | None = None,
        inferred: bool = False,
    ) -> ir.Node:
        """`add_layer` of raw values."""
        layer_name = self.unique_name(name or self.scope or _lower(op_type))
        origin = self.origin
        made: list[Made] = []
        for dtype, shape in outputs:
            made.append((f"{layer_name}.{len(made)}" if made else layer_name, dtype, raw_shape(shape)))
        node = make_node(
            domain,
            op_type,
            inputs,
            [to_attr(key, item) for key, item in attributes.items() if item is not None]
            if attributes
            else (),
            made,
            version,
            layer_name,
            None if origin is None else dict(origin),
        )
        if domain and domain not in self.graph.opset_imports:
            self.graph.opset_imports[domain] = 1
        self._place(node, inputs)
        self._layers[layer_name] = node
        if origin is not None:
            self.traced = True
        if (recorded := calls.made) is not None:
            recorded.append(node)
            calls.net = self
        if self.journal is not None:
            self.journal.append(_tuple(Added, (node, inferred)))
        return node

    def _place(self, node: ir.Node, inputs: tuple[ir.Value | None, ...]) -> None:
        anchor, graph, order = self.anchor, self.graph, self.order
        if anchor is None or graph_of(anchor) is not graph:
            graph.append(node)
            order.appended(node)
            return
        makers = [
            maker
            for value in inputs
            if value is not None and (maker := producer_of(value)) is not None and graph_of(maker) is graph
        ]
        late = order.place(anchor, makers)
        if late is None:
            insert_before(graph, anchor, node)
            order.inserted_before(anchor, node)
        else:  # it reads what is made behind the anchor
            graph.insert_after(late, node)
            order.relabel()

    @contextlib.contextmanager
    def before(self, layer: Layer) -> Iterator[None]:
        """While open, new layers are put right before `layer` and not at the end."""
        outer, self.anchor = self.anchor, layer.node
        try:
            yield
        finally:
            self.anchor = outer

    def mark_output(self, tensor: Tensor, name: str | None = None) -> None:
        value = tensor.value
        before = value.name
        if name is not None and value.name != name:
            value.name = self.unique_name(name)
        self.graph.outputs.append(value)
        if self.journal is not None:
            self.journal.append(Marked(value, before))

    def remove(self, layer: Layer) -> None:
        """Take a layer out; an error if anything still reads it."""
        node = layer.node
        if node.graph is not self.graph:
            raise NetworkError(f"layer {layer.name} is not in network {self.name}")
        if not is_dead(node):
            value = next(v for v in node.outputs if v.uses() or v.is_graph_output())
            who = ", ".join(str(use.node.name) for use in value.uses()) or "the network's outputs"
            raise NetworkError(f"layer {layer.name} cannot be removed: {value.name} is read by {who}")
        self.remove_dead([node], feeders=False)

    def remove_dead(self, nodes: list[ir.Node], *, feeders: bool = True) -> None:
        """Take out these layers, the last first, where nothing reads them, and what fed them alone."""
        graph, journal, memo, order = self.graph, self.journal, self.memo, self.order
        layers = self._layers
        while nodes:
            node = nodes.pop()
            if graph_of(node) is not graph or not is_dead(node):
                continue
            inputs, name = inputs_of(node), name_of(node)
            info = None if memo is None else memo.taken(name)
            if journal is not None:
                journal.append(_tuple(Removed, (node, inputs, order.taken(node), info)))
            else:
                order.removed(node)
            take_out(graph, node)
            layers.pop(name, None)
            if feeders:
                for value in inputs:
                    if value is not None and (maker := producer_of(value)) is not None and is_dead(maker):
                        nodes.append(maker)

    def forget_layer(self, node: ir.Node) -> None:
        """Drop what is remembered of a layer that left the graph."""
        name = name_of(node)
        self._layers.pop(name, None)
        self.order.removed(node)
        if self.memo is not None:
            self.memo.remove(name)

    def restored(self, node: ir.Node, info: FLayerInfo | None) -> None:
        """Remember a layer that came back."""
        self._layers[str(node.name)] = node
        if info is not None and self.memo is not None:
            self.memo.restore(str(node.name), info)

    def forget_constant(self, key: Any) -> None:
        if key is not None:
            self._constants.pop(key, None)

    def drop_unused_constants(self) -> int:
        """Take out the constants nothing reads; how many there were."""
        unused = [v for v in self.graph.initializers.values() if not v.uses() and not v.is_graph_output()]
        for value in unused:
            self.graph.initializers.pop(str(value.name))
        gone = set(unused)
        self._constants = {key: value for key, value in self._constants.items() if value not in gone}
        return len(unused)

    def replace_all_uses(self, old: Tensor, new: Tensor) -> None:
        """Redirect every use of `old`, network outputs included; refused if that would close a cycle.

        A network's outputs keep their names: `new` takes the name over, or an Identity does
        where `new` is an input, a constant or an output already.
        """
        self.replace_value(old.value, new.value)

    def replace_value(self, before: ir.Value, after: ir.Value) -> None:
        """`replace_all_uses` of raw values."""
        if before is after:
            return
        made, graph = producer_of(after), self.graph
        if (after.graph if made is None else graph_of(made)) is not graph:
            raise NetworkError(f"{after.name} does not belong to the network of {before.name}")
        uses = uses_of(before)
        if made is not None:
            self._order_uses(before, after, made, uses)
        move_uses(before, after, uses)
        positions: tuple[int, ...] = ()
        swapped = False
        shown = after
        if is_output(before):
            positions = tuple(i for i, value in enumerate(graph.outputs) if value is before)
            if made is None or is_output(after):
                shown = self._identity(after)
            for position in positions:
                graph.outputs[position] = shown
            before.name, shown.name = shown.name, before.name
            swapped = True
        if self.journal is not None:
            self.journal.append(_tuple(Moved, (before, shown, uses, positions, swapped)))
        if self.memo is not None:
            self.memo.uses_moved(before, after)

    def replace_use(self, layer: Layer, index: int, new: Tensor) -> None:
        """Redirect one use; refused if that would close a cycle."""
        old = layer.node.inputs[index]
        if new.value.graph is not self.graph:
            raise NetworkError(f"{new.name} does not belong to the network of {layer.name}")
        uses = ((layer.node, index),)
        if (maker := producer_of(new.value)) is not None:
            self._order_uses(new.value if old is None else old, new.value, maker, uses)
        layer.node.replace_input_with(index, new.value)
        if self.journal is not None:
            self.journal.append(Redirected(layer.node, index, old, new.value))

    def _identity(self, value: ir.Value) -> ir.Value:
        outer, self.anchor = self.anchor, None
        made = self.add_layer(
            "Identity", [Tensor.of(value)], outputs=[(Tensor.of(value).dtype, Tensor.of(value).shape)]
        )
        self.anchor = outer
        return made.node.outputs[0]

    def _order_uses(
        self, old: ir.Value, new: ir.Value, maker: ir.Node, uses: Collection[tuple[ir.Node, int]]
    ) -> None:
        """Let the readers stand behind the maker of `new`, or refuse if it is made from one of them."""
        graph, order = self.graph, self.order
        limit, early = order.of(maker), []
        for node, _ in uses:
            reader = node if graph_of(node) is graph else self._owner(node)
            if order.of(reader) <= limit:
                early.append(reader)
        if not early:
            return
        # Everything made from an early reader and standing before the maker moves behind it.
        region = dict.fromkeys(early)
        stack = list(early)
        while stack:
            node = stack.pop()
            if node is maker:
                raise NetworkError(f"replacing {old.name} with {new.name} would close a cycle")
            for value in node.outputs:
                for user, _ in value.uses():
                    reader = user if user.graph is self.graph else self._owner(user)
                    if reader not in region and self.order.of(reader) <= limit:
                        region[reader] = None
                        stack.append(reader)
        moving = sorted(region, key=self.order.of)
        self.graph.remove(moving)
        self.graph.insert_after(maker, moving)
        self.order.relabel()

    def _owner(self, inner: ir.Node) -> ir.Node:
        """The layer of this network in whose body `inner` stands."""
        for node in self.graph:
            for attr in node.attributes.values():
                bodies = [attr.value] if isinstance(attr.value, ir.Graph) else []
                if any(inner in body.all_nodes() for body in bodies):
                    return node
        raise NetworkError(f"layer {inner.name} belongs to another network")

    def to_dot(self, path: str | os.PathLike[str] | None = None) -> str:
        """The network as a Graphviz drawing, written to `path` if one is given."""
        from intarsia.network.text import dot_text

        text = dot_text(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> Any:
        """The network as an `onnx.ModelProto`, saved to `path` if one is given."""
        model = ir.Model(self.graph, ir_version=10, producer_name="intarsia")
        if path is not None:
            ir.save(model, path)
        return ir.to_proto(model)

    def verify(self) -> None:
        """Raise NetworkError unless the network is well formed."""
        from intarsia.network.verify import verify

        verify(self)


def _onnx_dtype(dtype: torch.dtype | ir.DataType) -> ir.DataType:
    return dtypes.to_onnx(dtype) if isinstance(dtype, torch.dtype) else dtype


@contextlib.contextmanager
def net_guard(net: Network) -> Iterator[Network]:
    """While open, functionals of this thread add their layers to `net`."""
    stack: list[Network] = _guards.__dict__.setdefault("stack", [])
    stack.append(net)
    try:
        yield net
    finally:
        stack.pop()


def default_net(*tensors: Any) -> Network:
    """The network under guard; without a guard, the one the given tensors belong to."""
    stack: list[Network] = _guards.__dict__.get("stack", [])
    if stack:
        return stack[-1]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            return tensor.network
    raise NetworkError("no network is under guard; open one with `with net_guard(net):`")
