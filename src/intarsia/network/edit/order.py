"""The order of a graph's layers as numbers: "made before" is one comparison, and neighbours are known.

A cycle is refused before it exists, and a removed layer comes back to its place without a walk.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_GAP = 1 << 40  # between layers that were appended
_STEP = 1 << 16  # what one insertion takes of a gap, if the gap is wide


class Order:
    """Labels that grow along the list of layers, and each layer's neighbours in it.

    `onnx_ir` tells neither a layer's place nor its neighbour without a walk over the whole list. A layer that
    was put into the graph directly has no label until one is asked for; the whole list is then read anew.
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
        """Put a layer before the anchor, or behind the last of `makers` if that is not before the anchor."""
        labels = self._labels
        if anchor not in labels or any(maker not in labels for maker in makers):
            self.relabel()
        last = max(makers, key=labels.__getitem__, default=None)
        if last is None or labels[last] < labels[anchor]:
            self.insert(node, anchor)
        else:
            self.insert(node, self.behind(last))

    def behind(self, node: ir.Node) -> ir.Node | None:
        """The layer that stands behind this one; None at the end."""
        if node not in self._labels:
            self.relabel()
        behind = self._behind[node]
        while behind is not None and behind.graph is not self._graph:  # taken out of the graph directly
            behind = self._behind.get(behind)
        return behind

    def remove(self, node: ir.Node) -> ir.Node | None:
        """Take a layer out of the graph; gives the layer that stood behind it."""
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
        """Let these layers, all of the graph, stand in this order."""
        self._graph.remove(nodes)
        self._graph.extend(nodes)
        self.relabel()

    def complete(self) -> list[ir.Node]:
        """All layers in order; the labels are renewed if the list was edited directly."""
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
        """Note that a layer stands before another, or at the end."""
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
