"""Where each layer stands: labels that grow along the list, so "made before" is one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.bodies import own_bodies
from intarsia.network.edit import make
from intarsia.network.edit.journal import Ordered
from intarsia.network.edit.make import next_of, nodes_of

if TYPE_CHECKING:
    from intarsia.network.network import Network

_GAP = 1 << 40  # between layers that were appended
_STEP = 1 << 16  # what one insertion takes of a gap, if the gap is wide
_new = object.__new__


class Order:
    """Labels of the layers of one network, kept as layers are appended and put in.

    A layer that came by another road than the network has none; the whole list is then labelled anew.
    """

    def __init__(self, net: Network) -> None:
        self._net, self._graph = net, net.graph
        self.labels: dict[ir.Node | None, int] = {None: 0}  # None stands before the first
        self._last = 0
        self._lows: dict[ir.Node, int] = {}  # what labels above a layer begin at, where the list cannot say

    def of(self, node: ir.Node) -> int:
        """The label of a layer of the graph."""
        if node not in self.labels:
            self.relabel()
        return self.labels[node]

    def appended(self, node: ir.Node) -> None:
        self._last = self.labels[node] = self._last + _GAP

    def put(self, node: ir.Node, anchor: ir.Node, reads: Sequence[ir.Value | None]) -> None:
        """Put a layer before the anchor, or behind what it reads if that is made later."""
        labels, graph = self.labels, self._graph
        high = labels.get(anchor, 0)
        for value in reads:
            if value is not None:
                maker = value._producer
                if (value._graph is not graph) if maker is None else (labels.get(maker, high) >= high):
                    self._put_behind(node, anchor, reads)
                    return
        if not make.SHORT:
            self._put_slowly(node, anchor, high)
            return
        new: Any = node
        new._graph = graph
        nodes: Any = graph._nodes
        boxes = nodes._value_ids_to_boxes
        behind = boxes[id(anchor)]
        before = behind.prev
        boxes[id(node)] = before.next = behind.prev = box = _new(make.Box)
        box.prev = before
        box.next = behind
        box.value = node
        box.owning_list = nodes
        nodes._length += 1
        low = labels.get(before.value, high)
        if high - low < 2:
            self.relabel()
        else:
            gap = (high - low) >> 1
            labels[node] = low + (gap if gap < _STEP else _STEP)

    def _put_slowly(self, node: ir.Node, anchor: ir.Node, high: int) -> None:
        """`put` where nobody knows how the list is kept."""
        self._graph.insert_before(anchor, node)
        low = self._lows.get(anchor, high - _GAP)
        gap = (high - low) >> 1
        if gap <= 0 or anchor not in self.labels:
            self.relabel()
            return
        self.labels[node] = label = low + (gap if gap < _STEP else _STEP)
        self._lows[node], self._lows[anchor] = low, label

    def _put_behind(self, node: ir.Node, anchor: ir.Node, reads: Sequence[ir.Value | None]) -> None:
        """`put` of a layer that reads what has no label yet, or is not made before the anchor."""
        self.check(node, reads)
        makers = [value._producer for value in reads if value is not None and value._producer]
        makers = [maker for maker in makers if maker._graph is self._graph]
        for one in (anchor, *makers):  # all have labels before any two are compared: a new one changes others
            self.of(one)
        last = max(makers, key=self.of, default=None)
        if last is None or self.of(last) < self.of(anchor):
            self.put(node, anchor, ())
        elif (behind := next_of(self._graph, last)) is None:
            self._graph.append(node)
            self.appended(node)
        elif behind is not last:
            self.put(node, behind, ())
        else:
            self._graph.insert_after(last, node)
            self.relabel()

    def check(self, node: ir.Node, reads: Sequence[ir.Value | None]) -> None:
        """While a rewrite is tried, an error if a layer reads what is not of this network.

        A body that is being made reads what is around it, and the network it will be part of is not known.
        """
        if self._net.journal is None:
            return
        for value in reads:
            if value is not None and value.graph is not self._graph:
                node.resize_inputs(0)
                raise NetworkError(f"layer {node.name} reads {value.name}, which is not of this network")

    def removed(self, node: ir.Node) -> None:
        self.labels.pop(node, None)

    def restored(self, node: ir.Node, label: int) -> None:
        self.labels[node], self._last = label, max(label, self._last)

    def complete(self) -> list[ir.Node]:
        """All layers in order; those that came by another road, or were moved by one, are labelled now."""
        nodes = nodes_of(self._graph)
        labels = list(map(self.labels.get, nodes))
        if len(self.labels) != len(nodes) + 1 or None in labels or labels != sorted(labels):  # type: ignore[type-var]
            self.relabel()
        return nodes

    def keep(self) -> None:
        """Let the order of all layers, as it is, be part of what an undo brings back."""
        if self._net.journal is not None:
            self._net.journal.append((Ordered, nodes_of(self._graph), dict(self.labels), dict(self._lows)))

    def labelled(self, labels: dict[ir.Node | None, int], lows: dict[ir.Node, int]) -> None:
        """Take labels as `keep` kept them."""
        self.labels.clear()
        self.labels.update(labels)
        self._lows, self._last = dict(lows), max(labels.values())

    def relabel(self) -> None:
        """Label every layer anew, in the order of the list."""
        self.keep()
        self.labels.clear()
        self._lows.clear()
        self.labels[None] = self._last = 0
        for node in self._graph:
            self.appended(node)
            if node._attributes.data and own_bodies(node, lost=True):
                self._net.has_bodies = True
