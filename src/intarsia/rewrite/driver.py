"""The worklist: every pattern at every layer it could match, highest benefit first, to a fixpoint."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, net_guard
from intarsia.network.attributes import owner_in
from intarsia.network.edit.journal import InputReplaced, LayerRemoved, TypeChanged, UsesReplaced
from intarsia.network.ops import MAY_BE_IDENTITY
from intarsia.network.text import kind_of
from intarsia.network.verify import verify_links
from intarsia.rewrite.pattern import PatternRewriter, Refusal
from intarsia.rewrite.transaction import Broken, Change, RewriteLog, attempt, last_line

P = TypeVar("P")
_LOOP = 64  # replacements of replacements that are looked at to find a loop


@dataclass(frozen=True)
class _Replaced:
    """A layer that was replaced, and the earlier replacement that created it."""

    label: str
    op_type: str
    inputs: Sequence[ir.Value | None]
    attributes: Mapping[str, ir.Attr]
    before: _Replaced | None


class _Level:
    """The patterns of one benefit, and the layers to try them at."""

    def __init__(self, patterns: int) -> None:
        self.patterns = patterns
        self._waiting: deque[ir.Node] = deque()
        self._queued: dict[ir.Node, int] = {}  # the patterns to try at those that wait
        # Layers that a pattern refused for a reason beyond its reach; after how many rewrites.
        self.undecided: dict[tuple[ir.Node, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, node: ir.Node, patterns: int) -> None:
        """Queue a layer for these patterns."""
        if node not in self._queued:
            self._waiting.append(node)
        self._queued[node] = self._queued.get(node, 0) | patterns

    def pop(self) -> tuple[ir.Node, int]:
        node = self._waiting.popleft()
        return node, self._queued.pop(node)


class Driver:
    """One run of patterns over one network."""

    def __init__(
        self,
        net: Network,
        entries: Sequence[Entry],
        *,
        limit: int | None = None,
        budget: int | None = None,
        strict: bool = True,
    ) -> None:
        self.net = net
        self._index = PatternIndex(sorted(entries, key=lambda entry: -entry.benefit))
        levels: dict[float, int] = {}
        for n, entry in enumerate(self._index.entries):
            levels[entry.benefit] = levels.get(entry.benefit, 0) | 1 << n
        self._levels = [_Level(patterns) for patterns in levels.values()]  # highest benefit first
        self._level_of = [next(x for x in self._levels if x.patterns >> n & 1) for n in range(len(entries))]
        self._limit = limit
        self._budget = 1000 + 20 * len(net) if budget is None else budget
        self._strict = strict
        self._log = RewriteLog()
        self._history: dict[ir.Node, _Replaced] = {}  # of layers that rewrites made
        self._hubs: dict[ir.Value, int] = {}
        self._banned: set[tuple[str, ir.Node]] = set()

    def run(self) -> RewriteLog:
        """Rewrite until nothing matches, or `limit` rewrites are made; then verify the links."""
        log = self._log
        with net_guard(self.net):
            for node in self.net.order.complete():
                self._push(node, self._index.starting_at(node))
            while not log.exhausted:
                level = next(filter(None, self._levels), None)  # the highest with layers to try
                if level is not None:
                    self._work(level)
                elif not self._ask_again():
                    break
            if len(log):
                if self.net.journal is None:  # or what is going on could not be undone
                    self.net.drop_unused_constants()
                verify_links(self.net.graph)
        return log

    def _push(self, node: ir.Node, patterns: int) -> None:
        for number in bits(patterns):
            self._level_of[number].push(node, 1 << number)

    def _ask_again(self) -> bool:
        """After a change, queue the layers that a pattern refused for a reason beyond its reach."""
        fired, has_queued = len(self._log), False
        for level in self._levels:
            stale = [asked_before for asked_before, then in level.undecided.items() if then < fired]
            for node, number in stale:
                del level.undecided[node, number]
                if node.graph is self.net.graph:
                    level.push(node, 1 << number)
                    has_queued = True
        return has_queued

    def _work(self, level: _Level) -> None:
        """Try the layers of one level, until a rewrite may have queued some at a higher one."""
        while level:
            node, patterns = level.pop()
            if node.graph is not self.net.graph:
                continue  # gone since it was queued
            for number in bits(patterns):
                if self._try(level, number, node):
                    return

    def _try(self, level: _Level, number: int, node: ir.Node) -> bool:
        """Try a pattern at a layer; returns whether the layer is finished."""
        entry = self._index.entries[number]
        pattern = entry.pattern
        try:
            match = pattern.find(Layer(node))
        except Exception as error:
            self._fail_to_ask(entry, node, error)
            return False
        if not match:
            if pattern.reach is None:
                level.undecided[node, number] = len(self._log)
            return False
        if (entry.label, node) in self._banned:
            return False
        if self._limit is not None and len(self._log) >= self._limit:
            self._log.exhausted = True
            return True
        if self._act(entry, node, match):
            return True
        if pattern.reach is None or pattern.refuses_from_afar:
            level.undecided[node, number] = len(self._log)
        return False

    def _act(self, entry: Entry, node: ir.Node, match: Any) -> bool:
        """Apply a pattern where it matches; returns whether it changed something."""
        label, inputs = entry.label, node.inputs
        loop = self._loop(label, node)
        try:
            change = attempt(self.net, entry.pattern, node, match, keep=loop is None)
        except RewriteError as error:
            if self._strict:
                raise
            self._log.broken.append(Broken(label, str(error)))
            self._banned.add((label, node))
            return False
        if isinstance(change, Refusal):
            return False
        if loop is not None:
            raise RewriteError(loop)
        self._log.write(label, node, change.removed, change.made)
        if len(self._log) > self._budget:
            self._no_end()
        for new in change.made:
            before = self._history.get(node)
            self._history[new] = _Replaced(label, node.op_type, inputs, node.attributes, before)
        seeds = changed_layers(change, self._hubs)
        for near, patterns in self._index.affected(self.net.graph, seeds).items():
            self._push(near, patterns)
        return True

    def _fail_to_ask(self, entry: Entry, node: ir.Node, error: Exception) -> None:
        """A pattern raised an error in its match."""
        where = f"layer {node.name} ({node.op_type})"
        message = f"pattern {entry.pattern.name!r} could not be checked at {where}: {last_line(error)}"
        if self._strict:
            raise RewriteError(message) from error
        failure = Broken(entry.label, message)
        if failure not in self._log.broken:
            self._log.broken.append(failure)

    def _no_end(self) -> None:
        recent = Counter(one.pattern for one in self._log.fired[-200:])
        labels = ", ".join(f"{name!r} ({count})" for name, count in recent.most_common(4))
        raise RewriteError(f"{self._budget} rewrites without an end; the last 200 came from {labels}")

    def _loop(self, label: str, node: ir.Node) -> str | None:
        """The message if a pattern changes a layer that it replaced before in the same form."""
        step, labels = self._history.get(node), [label]
        while step is not None and len(labels) < _LOOP:
            labels.append(step.label)
            if (
                step.label == label
                and step.op_type == node.op_type
                and step.inputs == node.inputs
                and _values(step.attributes) == _values(node.attributes)
            ):
                names = " and ".join(repr(name) for name in dict.fromkeys(reversed(labels)))
                return (
                    f"patterns {names} feed each other: layer {node.name} ({node.op_type}) is back"
                    " as it was; make one of them refuse what the other makes"
                )
            step = step.before
        return None


def _values(attributes: Mapping[str, ir.Attr]) -> dict[str, object]:
    return {name: attr.value for name, attr in attributes.items()}


# Which patterns a layer concerns: those that may start at it, and those that may have it inside a match.
#
# After a rewrite only those patterns are tried again that can see a changed layer through layers of their own
# kinds and within their depth. A random test tries all patterns everywhere at the end and finds nothing.

_READERS = 64  # no pattern counts the readers of a value that has more


@dataclass(frozen=True)
class Labelled(Generic[P]):
    """A pattern as a manager holds it."""

    label: str
    pattern: P
    benefit: float


Entry = Labelled[PatternRewriter]


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

        A pattern sees a changed layer only through layers of its own kinds, within its reach; layers that may
        change nothing do not count.
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
    """The layers that are new, have other inputs, or have results with other readers than before.

    `hubs` is the same dictionary for all rewrites. For a value with many readers, it has the number that the
    value can lose before they are counted again, since `onnx_ir` lists all readers to count them.
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
