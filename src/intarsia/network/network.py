"""A network: a thin view over an `onnx_ir` graph, with the layers and tensors views of its own."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from intarsia.errors import NetworkError
from intarsia.network import dtypes
from intarsia.network.attributes import to_attr
from intarsia.network.bodies import outer_reads, own_bodies
from intarsia.network.edit import make
from intarsia.network.edit.journal import Added, Constant, Edit, Given, Marked, Owned
from intarsia.network.edit.make import make_node, share_names
from intarsia.network.edit.order import Order
from intarsia.network.edit.raw import name_of
from intarsia.network.edit.redirect import copied, replace_read, replace_value
from intarsia.network.edit.remove import remove_dead
from intarsia.network.edit.uses import is_dead
from intarsia.network.guard import default_net as default_net
from intarsia.network.guard import here as here
from intarsia.network.guard import net_guard as net_guard
from intarsia.network.layer import Layer as Layer
from intarsia.network.tensor import Tensor as Tensor
from intarsia.network.types import MICROSOFT as MICROSOFT
from intarsia.network.types import OPSET as OPSET
from intarsia.network.types import Dim as Dim
from intarsia.network.types import Shape as Shape
from intarsia.network.types import raw_shape as raw_shape

if TYPE_CHECKING:
    from intarsia.network.signature import Call, FLayerInfo

_lower = functools.cache(str.lower)


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
        from intarsia.network.signature import FLayerInfoMemo

        self.graph = graph
        graph.meta["intarsia.network"] = self
        self.memo = FLayerInfoMemo(self)
        self.journal: list[Edit] | None = None  # kept while a rewrite is tried
        self.order = Order(self)
        self.made: list[ir.Node] | None = None  # by the functional that runs now
        self.by_name: dict[str, ir.Node] | None = None  # from the first time one is asked for
        self._names: dict[str, int] = {}
        self._taken = share_names(graph, self._names)
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        self.anchor: ir.Node | None = None
        self.scope = ""  # how layers made now are called
        self.has_bodies = False  # whether layers may hold graphs
        self.traced = False  # whether any layer knows where it comes from
        self.origin: dict[str, str] | None = None  # where they come from: module path, source line

    @staticmethod
    def of(graph: ir.Graph) -> Network:
        """The network a raw graph belongs to, made on first sight for a graph made elsewhere."""
        found = graph.meta.get("intarsia.network")
        if isinstance(found, Network):
            return found
        net = object.__new__(Network)
        net._own(graph)
        net.traced = any(node.metadata_props for node in graph)
        for value in (*graph.inputs, *graph.initializers.values()):
            net._names[str(value.name)] = 0
        for node in graph:
            node.name = net.unique_name(node.name or node.op_type.lower())
            for value in node.outputs:
                net._names.setdefault(str(value.name), 0)
        return net

    @property
    def name(self) -> str:
        return self.graph.name or "network"

    def __str__(self) -> str:
        from intarsia.network.text import graph_text

        return graph_text(self.graph)

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
        """The layer of this name; a name given to a raw node is not seen until a raw node comes or goes."""
        node = None if self.by_name is None else self.by_name.get(name)
        if node is None or node.graph is not self.graph or node.name != name:
            # Raw nodes come and go without a word to us.
            stale = node is not None or self.by_name is None or self._taken.grew
            if stale or len(self.by_name) != len(self.graph):  # type: ignore[arg-type]
                self.by_name = {name_of(node): node for node in self.graph}
                self._taken.grew = not make.SHORT
            node = self.by_name.get(name)  # type: ignore[union-attr]
        return None if node is None else Layer(node)

    def is_input(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_input() and tensor.value.graph is self.graph

    def is_output(self, tensor: Tensor) -> bool:
        return tensor.value.is_graph_output() and tensor.value.graph is self.graph

    def unique_name(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2`, ... if taken."""
        names = self._names
        count = names.get(hint)
        if count is None:
            names[hint] = 0
            return hint
        while True:
            count += 1
            name = f"{hint}_{count}"
            if name not in names:
                names[hint] = count
                names[name] = 0
                return name

    def add_input(self, name: str, dtype: torch.dtype | ir.DataType, shape: Sequence[Dim]) -> Tensor:
        value = ir.Value(
            name=self.unique_name(name), type=ir.TensorType(_onnx_dtype(dtype)), shape=raw_shape(tuple(shape))
        )
        self.graph.inputs.append(value)
        if self.journal is not None:
            self.journal.append((Given, value))
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
            self.journal.append((Constant, value, key))
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
        dtype, shape = outputs[0]
        made = [(layer_name, dtype, raw_shape(shape))]
        if len(outputs) > 1:
            for dtype, shape in outputs[1:]:
                made.append((f"{layer_name}.{len(made)}", dtype, raw_shape(shape)))
        given: Sequence[ir.Attr] = ()
        if attributes:
            given = [to_attr(key, item) for key, item in attributes.items() if item is not None]
        origin = self.origin
        if origin is not None:
            origin, self.traced = dict(origin), True
        node = make_node(domain, op_type, inputs, given, made, version, layer_name, origin)
        if domain and domain not in self.graph.opset_imports:
            self.graph.opset_imports[domain] = 1
        if not attributes or not (owned := own_bodies(node)):
            self._place(node, layer_name, inferred, inputs)
            return node
        self.has_bodies = True
        self._place(node, layer_name, inferred, [*inputs, *(value for *_, value in outer_reads(node))])
        if self.journal is not None:
            self.journal += [(Owned, body, before) for body, before in owned]
        return node

    def add_alike(
        self, op_type: str, hint: str, inputs: tuple[ir.Value, ...], dtype: ir.DataType, shape: ir.Shape
    ) -> ir.Node:
        """`add_node` of one of ONNX's own operators, whose one output its rule gives this type and shape."""
        name = self.unique_name(self.scope or hint)
        origin = self.origin
        if origin is not None:
            origin, self.traced = dict(origin), True
        node = make_node("", op_type, inputs, (), ((name, dtype, shape),), None, name, origin)
        self._place(node, name, True, inputs)
        return node

    def _place(self, node: ir.Node, name: str, inferred: bool, reads: Sequence[ir.Value | None]) -> None:
        """Let a new layer stand before the anchor or at the end, and remember it."""
        graph, anchor, journal = self.graph, self.anchor, self.journal
        if anchor is None or anchor._graph is not graph:
            self.order.check(node, reads)
            grew = self._taken.grew
            graph.append(node)
            self._taken.grew = grew
            self.order.appended(node)
        else:
            self.order.put(node, anchor, reads)
        if self.by_name is not None:
            self.by_name[name] = node
        if self.made is not None:
            self.made.append(node)
        if journal is not None:
            journal.append((Added, node, inferred))

    @contextlib.contextmanager
    def before(self, layer: Layer) -> Iterator[None]:
        """While open, new layers are put right before `layer` and not at the end."""
        outer, self.anchor = self.anchor, layer.node
        try:
            yield
        finally:
            self.anchor = outer

    def mark_output(self, tensor: Tensor, name: str | None = None) -> None:
        """Make a tensor an output, under this name; an input or output that has another keeps that."""
        value = tensor.value
        if name is not None and value.name != name and (value.is_graph_input() or value.is_graph_output()):
            value = copied(self, value)
        before = value.name
        if name is not None and value.name != name:
            value.name = self.unique_name(name)
        self.graph.outputs.append(value)
        if self.journal is not None:
            self.journal.append((Marked, value, before))

    def remove(self, layer: Layer) -> None:
        """Take a layer out; an error if anything still reads it."""
        node = layer.node
        if node.graph is not self.graph:
            raise NetworkError(f"layer {layer.name} is not in network {self.name}")
        if not is_dead(node):
            value = next(v for v in node.outputs if v.uses() or v.is_graph_output())
            who = ", ".join(str(use.node.name) for use in value.uses()) or "the network's outputs"
            raise NetworkError(f"layer {layer.name} cannot be removed: {value.name} is read by {who}")
        remove_dead(self, [node], [], feeders=False)

    def forget_layer(self, node: ir.Node) -> None:
        """Drop what is remembered of a layer that left the graph."""
        name = name_of(node)
        if self.by_name is not None:
            self.by_name.pop(name, None)
        self.order.removed(node)
        self.memo.remove(name)

    def restored(self, node: ir.Node, info: FLayerInfo | Call | None) -> None:
        """Remember a layer that came back."""
        if self.by_name is not None:
            self.by_name[str(node.name)] = node
        if info is not None:
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
        replace_value(self, old.value, new.value)

    def replace_use(self, layer: Layer, index: int, new: Tensor) -> None:
        """Redirect one use; refused if that would close a cycle."""
        replace_read(self, layer.node, index, new.value)

    def to_dot(self, path: str | os.PathLike[str] | None = None) -> str:
        """The network as a Graphviz drawing, written to `path` if one is given."""
        from intarsia.network.text import dot_text

        text = dot_text(self.graph)
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

        verify(self.graph)


def _onnx_dtype(dtype: torch.dtype | ir.DataType) -> ir.DataType:
    return dtypes.to_onnx(dtype) if isinstance(dtype, torch.dtype) else dtype
