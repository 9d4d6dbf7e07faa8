"""Where each layer stands: labels that grow along the list, so "made before" is one comparison."""

from __future__ import annotations

import onnx_ir as ir

_GAP = 1 << 60  # between layers that were appended
_STEP = 1 << 24  # what one insertion takes of a gap, if the gap is wide


class Order:
    """Labels of the layers of one graph, kept as layers are appended and put in.

    `_low[layer]` is a label no layer above it and below the layer's own has: the room for insertion.
    A layer that came by another road than the network has no label; the whole list is then labelled anew.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._label: dict[ir.Node, int] = {}
        self._low: dict[ir.Node, int] = {}
        self._last = 0

    def of(self, node: ir.Node) -> int:
        """The label of a layer of the graph."""
        label = self._label.get(node)
        if label is None:
            self.relabel()
            label = self._label[node]
        return label

    def appended(self, node: ir.Node) -> None:
        self._low[node] = self._last
        self._last += _GAP
        self._label[node] = self._last

    def inserted_before(self, anchor: ir.Node, node: ir.Node) -> None:
        low, high = self._low.get(anchor), self._label.get(anchor)
        if low is None or high is None or high - low < 2:
            self.relabel()
            return
        label = low + min((high - low) >> 1, _STEP)
        self._label[node], self._low[node], self._low[anchor] = label, low, label

    def taken(self, node: ir.Node) -> int:
        """The label of a layer that is about to leave the graph, which is then forgotten."""
        label = self._label.pop(node, None)
        if label is None:
            self.relabel()
            label = self._label.pop(node)
        self._low.pop(node, None)
        return label

    def place(self, anchor: ir.Node, makers: list[ir.Node]) -> ir.Node | None:
        """The last of these makers that stands behind the anchor or is it; None if all stand before it."""
        labels = self._label
        limit, late = labels.get(anchor), None
        if limit is None:
            limit = self.of(anchor)
        for maker in makers:
            label = labels.get(maker)
            if label is None:
                self.relabel()
                return self.place(anchor, makers)
            if label >= limit:
                limit, late = label, maker
        return late

    def removed(self, node: ir.Node) -> None:
        self._label.pop(node, None)
        self._low.pop(node, None)

    def relabel(self) -> None:
        """Label every layer anew, in the order of the list."""
        self._label.clear()
        self._low.clear()
        self._last = 0
        for node in self._graph:
            self.appended(node)
