"""Where each layer stands: labels that grow along the list, so "made before" is one comparison."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.network.make import insert_before

_GAP = 1 << 60  # between layers that were appended
_STEP = 1 << 24  # what one insertion takes of a gap, if the gap is wide


class Order:
    """Labels of the layers of one graph, kept as layers are appended and put in.

    Each layer has its label, and a lower one that no layer above it and below that label has: the room
    for insertion. A layer that came by another road than the network has none; the whole list is then
    labelled anew.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.places: dict[ir.Node, tuple[int, int]] = {}
        self._last = 0

    def of(self, node: ir.Node) -> int:
        """The label of a layer of the graph."""
        return (self.places.get(node) or self.labelled(node))[0]

    def labelled(self, node: ir.Node) -> tuple[int, int]:
        """The place of a layer that has none yet."""
        self.relabel()
        return self.places[node]

    def appended(self, node: ir.Node) -> None:
        low = self._last
        self._last = label = low + _GAP
        self.places[node] = (label, low)

    def put(self, node: ir.Node, anchor: ir.Node) -> None:
        """Put a layer before the anchor, or behind what it reads if that is made later."""
        graph, places = self._graph, self.places
        high, low = places.get(anchor) or self.labelled(anchor)
        late: ir.Node | None = None
        limit = high
        for value in node._inputs:
            if value is not None and (maker := value._producer) is not None and maker._graph is graph:
                place = places.get(maker)
                if place is None:
                    self.relabel()
                    self.put(node, anchor)
                    return
                if place[0] >= limit:
                    late, limit = maker, place[0]
        if late is not None:
            graph.insert_after(late, node)
            self.relabel()
            return
        insert_before(graph, anchor, node)
        gap = (high - low) >> 1
        if not gap:
            self.relabel()
            return
        label = low + (gap if gap < _STEP else _STEP)
        places[node] = (label, low)
        places[anchor] = (high, label)

    def removed(self, node: ir.Node) -> None:
        self.places.pop(node, None)

    def relabel(self) -> None:
        """Label every layer anew, in the order of the list."""
        self.places.clear()
        self._last = 0
        for node in self._graph:
            self.appended(node)
