"""Which patterns a layer concerns: those that may start at it, and those that may have it inside a match.

After a rewrite only those patterns are tried again that can see a changed layer through layers of their own
kinds and within their depth. A random test tries all patterns everywhere at the end and finds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from intarsia.network.bodies import owner_in
from intarsia.network.edit.journal import InputReplaced, LayerRemoved, TypeChanged, UsesReplaced
from intarsia.network.ops import MAY_BE_IDENTITY
from intarsia.network.text import kind_of
from intarsia.rewrite.pattern import PatternRewriter
from intarsia.rewrite.transaction import Change

_READERS = 64  # no pattern counts the readers of a value that has more


@dataclass(frozen=True)
class Entry:
    """A pattern as a manager holds it."""

    label: str
    pattern: PatternRewriter
    benefit: float


class PatternIndex:
    """Sets of patterns by the kind of a layer. A set is an integer: bit `n` stands for the n-th entry."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._everything = (1 << len(entries)) - 1
        self._start_anywhere = sum(1 << n for n, e in enumerate(entries) if e.pattern.root_layer is None)
        self._starts: dict[str, int] = {}
        self._inside: dict[str, int] = {}
        for n, entry in enumerate(entries):
            roots = entry.pattern.root_layer or frozenset()
            for kind in roots:
                self._starts[kind] = self._starts.get(kind, self._start_anywhere) | 1 << n
            for kind in entry.pattern.inner_kinds | roots:
                self._inside[kind] = self._inside.get(kind, self._start_anywhere) | 1 << n
        reaches = [entry.pattern.reach or 1 for entry in entries]
        self._deeper = [
            sum(1 << n for n, reach in enumerate(reaches) if reach > depth)
            for depth in range(max(reaches, default=0))
        ]

    def starting_at(self, node: ir.Node, patterns: int = -1) -> int:
        """Those of the patterns that may start at a layer: by its kind, and by what must feed it."""
        kind = kind_of(node)
        candidates = patterns & self._starts.get(kind, self._start_anywhere)
        fed: set[str] | None = None
        for n in bits(candidates):
            if groups := self.entries[n].pattern.fed_by.get(kind):
                if fed is None:
                    fed = {maker.op_type for maker in node.predecessors()}
                if any(group.isdisjoint(fed) for group in groups):
                    candidates ^= 1 << n
        return candidates

    def affected(self, graph: ir.Graph, seeds: Iterable[ir.Node]) -> dict[ir.Node, int]:
        """The layers at which a pattern may match now that these have changed, each with those patterns.

        A pattern sees a changed layer only through layers of kinds that it is about, and no further than it
        reaches; layers that may change nothing do not count.
        """
        depths: dict[ir.Node, int] = {}
        front = [(owner, self._everything) for node in seeds if (owner := owner_in(graph, node)) is not None]
        for deeper in self._deeper:
            below: list[tuple[ir.Node, int]] = []
            while front:
                node, patterns = front.pop()
                if node.op_type not in MAY_BE_IDENTITY:
                    patterns &= self._inside.get(kind_of(node), self._start_anywhere)
                patterns &= deeper & ~depths.get(node, 0)
                if not patterns or node.graph is not graph:
                    continue  # seen, of no concern, or in a body: patterns look at one graph
                depths[node] = depths.get(node, 0) | patterns
                for value in node.outputs:
                    for reader in value.consumers():
                        (front if reader.op_type in MAY_BE_IDENTITY else below).append((reader, patterns))
            front = below
        return {node: start for node, some in depths.items() if (start := self.starting_at(node, some))}


def bits(patterns: int) -> Iterator[int]:
    """The positions of a set's bits, lowest first."""
    while patterns:
        lowest = patterns & -patterns
        yield lowest.bit_length() - 1
        patterns ^= lowest


def changed_layers(change: Change, hubs: dict[ir.Value, int]) -> list[ir.Node]:
    """The layers that are new, read something else, or make what other layers read than before.

    `hubs`, kept from rewrite to rewrite, says of values with many readers how many they can lose before it is
    worth counting them again: `onnx_ir` lists all readers to count them.
    """
    nodes: dict[ir.Node, None] = dict.fromkeys(change.made)
    recounted: Counter[ir.Value | None] = Counter()  # values that gained or lost readers, and how many
    for node in change.made:
        recounted.update(node.inputs)
    for edit in change.edits:
        match edit:
            case UsesReplaced(new=new, uses=uses):
                nodes.update(dict.fromkeys(reader for reader, _ in uses))
                recounted[new] += 1
            case InputReplaced(node=node, old=old, new=new):
                nodes[node] = None
                recounted.update((old, new))
            case LayerRemoved(inputs=inputs, released=released):
                recounted.update((*inputs, *(use.value for use in released)))
            case TypeChanged(value=value):
                recounted[value] += 1
                nodes.update(dict.fromkeys(value.consumers()))
    for read, times in recounted.items():
        if read is None or read.const_value is not None:
            continue
        if (spare := hubs.get(read, 0) - times) > 0:
            hubs[read] = spare
            continue
        if (count := len(read.uses())) > _READERS:
            hubs[read] = count - _READERS
            continue
        readers = read.consumers()
        if (maker := read.producer()) is not None:
            nodes[maker] = None
        nodes.update(dict.fromkeys(readers))
    return [node for node in nodes if node.graph is not None]
