"""The borders of segments: the inputs and outputs of each, and the nodes that it recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from intarsia.graph.nodes import is_compute, is_getitem, is_size, producer
from intarsia.graph.segment import Segment
from intarsia.graph.sizes import constant_value, input_symbols, symbol_of, symbols_of

Needs = dict[int, None]  # an ordered set of segment numbers


@dataclass(frozen=True, eq=False)
class Border:
    """The border of one segment. All nodes are in graph order.

    `local` is what the segment computes: its own nodes and the free ones that it recomputes. `sizes` gives,
    for a size that is not read from its own tensor, an input of the segment that has the same symbol, and the
    axis.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    local: tuple[fx.Node, ...]
    sizes: Mapping[fx.Node, tuple[fx.Node, int]]


def borders(
    graph: fx.Graph, segments: Sequence[Segment], at_hand: Sequence[Iterable[fx.Node]] = ()
) -> list[Border]:
    """The border of every segment and, at the end, of the epilogue.

    `at_hand` are tensors that each segment has anyway, and from which it may read a size.

    The epilogue has the free nodes that only the graph's output reads, such as a size. It is empty for most
    models. The graph is walked backwards, so the segments that need a value are known when the walk reaches
    it.

    ```
        x ──► [ A: conv ] ──► y ──► [ B: view(y, [size(x, 0), -1]) ]
                                          └ size is recomputed in B, off y or x: only tensors cross
    ```
    """
    return _Walk(graph, segments, at_hand).run()


class _Walk:
    """The state of the walk."""

    def __init__(
        self, graph: fx.Graph, segments: Sequence[Segment], at_hand: Sequence[Iterable[fx.Node]]
    ) -> None:
        self.graph = graph
        self.home = {node: number for number, segment in enumerate(segments) for node in segment.nodes}
        self.recomputed = [frozenset(segment.recomputed) for segment in segments]
        self.at_hand = [list(values) for values in at_hand] or [[] for _ in segments]
        self.segments = segments
        self.epilogue = len(segments)
        count = self.epilogue + 1
        self.needs: dict[fx.Node, Needs] = {}
        self.inputs: list[list[fx.Node]] = [[] for _ in range(count)]
        self.outputs: list[list[fx.Node]] = [[] for _ in range(count)]
        self.local: list[list[fx.Node]] = [[] for _ in range(count)]
        self.sizes: list[dict[fx.Node, tuple[fx.Node, int]]] = [{} for _ in range(count)]
        self.graph_symbols = input_symbols(graph)
        self.near_symbols: dict[int, dict[Any, tuple[fx.Node, int]]] = {}
        self.returned: dict[fx.Node, None] = {}

    def run(self) -> list[Border]:
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                self._output(node)
            elif node.op == "placeholder":
                for segment in self.needs.get(node, ()):
                    self.inputs[segment].append(node)
            elif is_compute(node):
                self._hand_out(node, node)
            else:
                self._free(node)
        self._add_late_sources()
        return [
            Border(tuple(reversed(i)), tuple(reversed(o)), tuple(reversed(n)), s)
            for i, o, n, s in zip(self.inputs, self.outputs, self.local, self.sizes, strict=True)
        ]

    def _add_late_sources(self) -> None:
        """Add tensors to borders from which only a size is read, if they come after the size in the graph.

        The backward walk had passed them when it reached the size.
        """
        touched: list[list[fx.Node]] = []
        for segment, sizes in enumerate(self.sizes):
            available = {*self.inputs[segment], *self.local[segment]}
            for source in dict.fromkeys(tensor for tensor, _ in sizes.values()):
                if source in available:
                    continue
                home = self.home[producer(source)]
                lists = [self.inputs[segment], self.outputs[home], self.local[home]]
                for nodes in lists:
                    if source not in nodes:
                        nodes.append(source)
                touched += lists
        if touched:
            place = {node: i for i, node in enumerate(self.graph.nodes)}
            for nodes in touched:
                nodes.sort(key=place.__getitem__, reverse=True)

    def _need(self, node: fx.Node, segment: int) -> None:
        self.needs.setdefault(node, {})[segment] = None

    def _output(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            self.returned[value] = None
            direct = (
                value.op == "placeholder"
                or is_compute(value)
                or (is_getitem(value) and is_compute(producer(value)))
            )
            if not direct:
                self._need(value, self.epilogue)

    def _hand_out(self, node: fx.Node, maker: fx.Node) -> None:
        """Add a value to the segments that need it, unless they recompute the node that makes it."""
        home = self.home.get(maker)
        if home is None:
            return  # `Plan.verify` reports it
        needs = self.needs.get(node, {})
        crosses = node in self.returned
        for segment in needs:
            if segment == home:
                continue
            if segment < self.epilogue and maker in self.recomputed[segment]:
                self._keep(node, segment)
                continue
            self.inputs[segment].append(node)
            crosses = True
        if crosses:
            self.outputs[home].append(node)
        if node is maker or crosses or home in needs:
            self._keep(node, home)

    def _free(self, node: fx.Node) -> None:
        if is_getitem(node) and is_compute(producer(node)):
            self._hand_out(node, producer(node))
            return
        for segment in self.needs.get(node, ()):
            if segment != self.epilogue and constant_value(node) is not None:
                continue
            source = self._size_source(node, segment) if is_size(node) else None
            if source is None:
                self._keep(node, segment)
                continue
            self.sizes[segment][node] = source
            self.local[segment].append(node)
            self._need(source[0], segment)

    def _keep(self, node: fx.Node, segment: int) -> None:
        self.local[segment].append(node)
        for value in node.all_input_nodes:
            self._need(value, segment)

    def _size_source(self, node: fx.Node, segment: int) -> tuple[fx.Node, int] | None:
        """Another tensor from which the segment reads this size; None if it reads the size's own tensor."""
        tensor = node.all_input_nodes[0]
        symbol = symbol_of(node)
        if tensor.op == "get_attr" or symbol is None:
            return None
        if segment != self.epilogue:
            if self.home.get(producer(tensor)) == segment or producer(tensor) in self.recomputed[segment]:
                return None
            if segment not in self.near_symbols:
                near = [*self._direct_inputs(segment), *self.at_hand[segment]]
                self.near_symbols[segment] = symbols_of(near)
            if symbol in self.near_symbols[segment]:
                return self.near_symbols[segment][symbol]
        return None if tensor.op == "placeholder" else self.graph_symbols.get(symbol)

    def _direct_inputs(self, segment: int) -> Iterable[fx.Node]:
        """Tensors from other segments that the segment's own nodes read."""
        for node in self.segments[segment].nodes:
            for value in node.all_input_nodes:
                if value.op == "get_attr" or producer(value) in self.recomputed[segment]:
                    continue
                if self.home.get(producer(value), -1) != segment:
                    yield value
