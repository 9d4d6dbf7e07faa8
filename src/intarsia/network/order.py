"""Where each layer stands: labels that grow along the list, so "made before" is one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from intarsia.network.journal import Ordered
from intarsia.network.make import insert_before, nodes_of

if TYPE_CHECKING:
    from intarsia.network.network import Network

_GAP = 1 << 40  # between layers that were appended
_STEP = 1 << 16  # what one insertion takes of a gap, if the gap is wide


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
            if value is not None and (maker := value._producer) is not None:
                made = labels.get(maker)
                if (made is None or made >= high) and maker._graph is graph:
                    self._put_behind(node, anchor, reads)
                    return
        before = insert_before(graph, anchor, node)
        low = labels.get(before) if before is not anchor else self._lows.get(anchor, high - _GAP)
        gap = 0 if low is None else (high - low) >> 1
        if low is None or gap <= 0:
            self.relabel()
            return
        labels[node] = label = low + (gap if gap < _STEP else _STEP)
        if before is anchor:
            self._lows[node], self._lows[anchor] = low, label

    def _put_behind(self, node: ir.Node, anchor: ir.Node, reads: Sequence[ir.Value | None]) -> None:
        """`put` of a layer that reads what has no label yet, or is made later than the anchor."""
        makers = [value._producer for value in reads if value is not None and value._producer]
        last = max((maker for maker in makers if maker._graph is self._graph), key=self.of)
        if self.of(last) < self.of(anchor):
            insert_before(self._graph, anchor, node)
        else:
            self._graph.insert_after(last, node)
        self.relabel()

    def removed(self, node: ir.Node) -> None:
        self.labels.pop(node, None)

    def restored(self, node: ir.Node, label: int) -> None:
        self.labels[node], self._last = label, max(label, self._last)

    def complete(self) -> None:
        """Label layers that came by another road, or were moved by one, if there are any."""
        labels, last, nodes = self.labels, 0, nodes_of(self._graph)
        if len(labels) != len(nodes) + 1:
            self.relabel()
            return
        for node in nodes:
            label = labels.get(node, 0)
            if label <= last:
                self.relabel()
                return
            last = label

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
