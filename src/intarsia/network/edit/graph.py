"""A graph that is edited: the names, the place and the order of new layers, and a journal of the edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.attributes import outer_uses, take_bodies, to_attr
from intarsia.network.edit.journal import (
    BodyTaken,
    ConstantAdded,
    ConstantKey,
    Edit,
    InputAdded,
    LayerAdded,
    TypeChanged,
)
from intarsia.network.value import Shape, raw_shape

_SHARED_BYTES = 64  # equal constants up to this size are shared


class EditableGraph:
    """An `onnx_ir` graph with the state that its edits share: journal, order, names, replacements.

    If `journal` is a list, every edit is appended to it, so that `undo` can reverse them. A graph `within`
    another is one of its bodies; the two share one set of names.
    """

    def __init__(self, graph: ir.Graph, within: EditableGraph | None = None) -> None:
        self.graph = graph
        self.journal: list[Edit] | None = None
        self.order: Order = Order(graph)
        self.replacements: Replacements = Replacements()
        self.constants: dict[ConstantKey, ir.Value] = {}  # small ones, by content
        self.anchor: ir.Node | None = None  # new layers are inserted before it; None: at the end
        self.scope = ""  # the name of new layers
        self.origin: dict[str, str] | None = None  # metadata of new layers: module path and source line
        self.new_nodes: list[ir.Node] | None = None  # receives every new layer, for the functional that runs
        # Every name that was ever used, and the last number appended to it.
        self.names: dict[str, int] = {} if within is None else within.names
        self._by_name: dict[str, ir.Node] = {}
        self._read_names()

    def _read_names(self) -> None:
        """Reserve the names of a graph that was made or edited elsewhere."""
        for value in (*self.graph.inputs, *self.graph.initializers.values()):
            self.names.setdefault(str(value.name), 0)
        for node in self.graph:
            for value in node.outputs:
                self.names.setdefault(str(value.name), 0)
            self.names.setdefault(str(node.name), 0)
            take_bodies(node, only_free=True)
        self._by_name = {str(node.name): node for node in self.graph}

    def unique_name(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2`, ... if it is in use."""
        if len(self.graph) != len(self.order):  # layers were added or removed directly
            self.order.relabel()
            self._read_names()
        names = self.names
        if hint not in names:
            names[hint] = 0
            return hint
        count = names[hint]
        while True:
            count += 1
            name = f"{hint}_{count}"
            if name not in names:
                names[hint], names[name] = count, 0
                return name

    def node_named(self, name: str) -> ir.Node | None:
        """The layer of this name, None if there is none."""
        node = self._by_name.get(name)
        if node is None or node.graph is not self.graph or node.name != name:
            self._by_name = {str(node.name): node for node in self.graph}
            node = self._by_name.get(name)
        return node

    def record(self, edit: Edit) -> None:
        if self.journal is not None:
            self.journal.append(edit)

    def new_input(self, name: str, dtype: ir.DataType, shape: Shape) -> ir.Value:
        """Add an input."""
        value = ir.Value(name=self.unique_name(name), type=ir.TensorType(dtype), shape=raw_shape(shape))
        self.graph.inputs.append(value)
        self.record(InputAdded(value))
        return value

    def new_constant(self, array: ir.TensorProtocol, name: str | None) -> ir.Value:
        """Add a constant. Small constants without a name are shared if they are equal."""
        shape = tuple(int(d) for d in array.shape)  # type: ignore[arg-type]
        key = None
        if name is None and array.nbytes <= _SHARED_BYTES:
            key = (array.dtype, shape, array.tobytes())
            if (constant := self.constants.get(key)) is not None:
                return constant
        value = ir.Value(
            name=self.unique_name(name or "const"),
            type=ir.TensorType(array.dtype),
            shape=raw_shape(shape),
            const_value=array,
        )
        self.graph.register_initializer(value)
        if key is not None:
            self.constants[key] = value
        self.record(ConstantAdded(value, key))
        return value

    def new_node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None,
        outputs: Sequence[tuple[ir.DataType, Shape]],
        *,
        domain: str = "",
        version: int | None = None,
        name: str | None = None,
        inferred: bool = False,
    ) -> ir.Node:
        """Add a layer whose outputs have these types, before the anchor or at the end.

        `inferred` says that the types come from the operator's own rule and need no check.
        """
        layer_name = self.unique_name(name or self.scope or op_type.lower())
        results = [
            ir.Value(
                name=f"{layer_name}.{index}" if index else layer_name,
                type=ir.TensorType(dtype),
                shape=raw_shape(shape),
            )
            for index, (dtype, shape) in enumerate(outputs)
        ]
        node = ir.Node(
            domain,
            op_type,
            inputs,
            [to_attr(key, item) for key, item in (attributes or {}).items() if item is not None],
            outputs=results,
            version=version,
            name=layer_name,
            metadata_props=None if self.origin is None else dict(self.origin),
        )
        owners = take_bodies(node) if attributes else []
        reads = [*inputs, *(use.value for use in outer_uses(node))] if owners else inputs
        self._check_reads(node, reads)
        if domain and domain not in self.graph.opset_imports:
            self.graph.opset_imports[domain] = 1
        anchor = self.anchor
        if anchor is None or anchor.graph is not self.graph:
            self.order.append(node)
        else:
            makers = [maker for value in reads if value is not None and (maker := value.producer())]
            self.order.place(node, anchor, [maker for maker in makers if maker.graph is self.graph])
        self.note_added(node)
        if self.new_nodes is not None:
            self.new_nodes.append(node)
        if self.journal is not None:
            self.journal.append(LayerAdded(node, inferred))
            self.journal += [BodyTaken(body, before) for body, before in owners]
        return node

    def _check_reads(self, node: ir.Node, reads: Sequence[ir.Value | None]) -> None:
        """While edits are recorded, raise NetworkError if a layer reads a value of another graph.

        At other times, a body under construction may read from the graph around it, which is not known yet.
        """
        if self.journal is None:
            return
        for value in reads:
            if value is not None and value.graph is not self.graph:
                node.resize_inputs(0)
                raise NetworkError(f"layer {node.name} reads {value.name}, which is not of this network")

    def note_added(self, node: ir.Node) -> None:
        """Index a new layer by its name."""
        self._by_name[str(node.name)] = node

    def note_removed(self, node: ir.Node) -> None:
        """Remove a layer from the index of names."""
        self._by_name.pop(str(node.name), None)

    def set_type(self, value: ir.Value, dtype: ir.DataType, shape: Shape) -> None:
        """Set the type and shape of a value; the journal has the old ones."""
        self.record(TypeChanged(value, value.type, value.shape))
        value.type, value.shape = ir.TensorType(dtype), raw_shape(shape)

    def drop_unused_constants(self) -> int:
        """Remove the constants that nothing reads; returns their number."""
        unused = [v for v in self.graph.initializers.values() if not v.uses() and not v.is_graph_output()]
        for value in unused:
            self.graph.initializers.pop(str(value.name))
        removed = set(unused)
        self.constants = {key: value for key, value in self.constants.items() if value not in removed}
        return len(unused)


class Replacements:
    """The replacements of one graph. `clock` counts them, so that a record can ask for the later ones."""

    def __init__(self) -> None:
        self.clock: int = 0
        self._values: dict[ir.Value, list[tuple[int, ir.Value]]] = {}

    def value_replaced(self, old: ir.Value, new: ir.Value) -> None:
        """Record that all readers of `old` now read `new`."""
        self.clock += 1
        self._values.setdefault(old, []).append((self.clock, new))

    def value_restored(self, old: ir.Value) -> None:
        """Remove the last replacement of `old`, which was undone."""
        self._values[old].pop()

    def follow(self, value: ir.Value, time: int) -> ir.Value:
        """The value that replaces `value`, named at `time`, now."""
        while True:
            for when, new in self._values.get(value, ()):
                if when > time:
                    time, value = when, new
                    break
            else:
                return value


# The order of layers as numbers: which of two comes first is one comparison, and neighbours are known. So a
# cycle is refused before it exists, and a removed layer returns to its place without a walk.

_GAP = 1 << 40  # between layers that were appended
_STEP = 1 << 16  # the distance of an inserted layer to the one before it, if the gap is wide


class Order:
    """Labels that increase along the list of layers, and the neighbours of each layer.

    `onnx_ir` finds a layer's position only by a walk over the list. A layer that was added to the graph
    directly has no label; when one is needed, the whole list is labelled again.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._labels: dict[ir.Node, int] = {}
        self._before: dict[ir.Node, ir.Node | None] = {}
        self._behind: dict[ir.Node, ir.Node | None] = {}
        self._last: ir.Node | None = None
        self.relabel()

    def __len__(self) -> int:
        return len(self._labels)

    def of(self, node: ir.Node) -> int:
        """The label of a layer of the graph."""
        if node not in self._labels:
            self.relabel()
        return self._labels[node]

    def append(self, node: ir.Node) -> None:
        """Put a layer at the end of the graph."""
        self._graph.append(node)
        self._link(node, None)

    def insert(self, node: ir.Node, behind: ir.Node | None) -> None:
        """Put a layer before another, or at the end."""
        if behind is None:
            self.append(node)
            return
        self._graph.insert_before(behind, node)
        if behind in self._labels:
            self._link(node, behind)
        else:
            self.relabel()

    def place(self, node: ir.Node, anchor: ir.Node, makers: Sequence[ir.Node]) -> None:
        """Insert a layer before the anchor, or after the last of `makers` if that comes later."""
        labels = self._labels
        if anchor not in labels or any(maker not in labels for maker in makers):
            self.relabel()
        last = max(makers, key=labels.__getitem__, default=None)
        if last is None or labels[last] < labels[anchor]:
            self.insert(node, anchor)
        else:
            self.insert(node, self.behind(last))

    def behind(self, node: ir.Node) -> ir.Node | None:
        """The layer after this one; None at the end."""
        if node not in self._labels:
            self.relabel()
        behind = self._behind[node]
        while behind is not None and behind.graph is not self._graph:  # removed from the graph directly
            behind = self._behind.get(behind)
        return behind

    def remove(self, node: ir.Node) -> ir.Node | None:
        """Remove a layer from the graph; returns the layer that was after it."""
        behind = self.behind(node)
        self._graph.remove(node)
        before = self._before.pop(node)
        del self._behind[node], self._labels[node]
        if before is not None:
            self._behind[before] = behind
        if behind is not None:
            self._before[behind] = before
        if node is self._last:
            self._last = before
        return behind

    def reorder(self, nodes: list[ir.Node]) -> None:
        """Put these layers, all of the graph, into this order."""
        self._graph.remove(nodes)
        self._graph.extend(nodes)
        self.relabel()

    def complete(self) -> list[ir.Node]:
        """All layers in order. The labels are renewed if the list was edited directly."""
        nodes = list(self._graph)
        labels = [self._labels.get(node, -1) for node in nodes]
        if len(self._labels) != len(nodes) or -1 in labels or labels != sorted(labels):
            self.relabel()
        return nodes

    def relabel(self) -> None:
        """Label every layer anew, in the order of the list."""
        self._labels.clear()
        self._before.clear()
        self._behind.clear()
        self._last = None
        for node in self._graph:
            self._link(node, None)

    def _link(self, node: ir.Node, behind: ir.Node | None) -> None:
        """Label a layer that is now before `behind`, or at the end."""
        labels = self._labels
        before = self._last if behind is None else self._before[behind]
        low = 0 if before is None else labels.get(before, 0)
        if behind is None:
            self._last = node
            labels[node] = low + _GAP
        else:
            self._before[behind] = node
            gap = (labels[behind] - low) >> 1
            if gap < 1:
                self.relabel()
                return
            labels[node] = low + min(gap, _STEP)
        self._before[node], self._behind[node] = before, behind
        if before is not None:
            self._behind[before] = node
