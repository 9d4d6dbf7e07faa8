"""The worklist: every pattern at every layer it could match, highest benefit first, to a fixpoint."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, net_guard
from intarsia.network.text import kind_of
from intarsia.network.verify import verify_links
from intarsia.rewrite.changed import changed_layers, distances_below
from intarsia.rewrite.log import RewriteLog
from intarsia.rewrite.pattern import PatternRewriter, Refusal
from intarsia.rewrite.transaction import attempt

_LOOP = 64  # replacements of replacements that are looked at to find a loop


@dataclass(frozen=True)
class Entry:
    """A pattern as a manager holds it."""

    label: str
    pattern: PatternRewriter
    benefit: float


@dataclass(frozen=True)
class _Replaced:
    """A layer that was replaced, and what had replaced an earlier one to make it."""

    label: str
    op_type: str
    inputs: Sequence[ir.Value | None]
    attributes: Mapping[str, ir.Attr]
    before: _Replaced | None


class _Level:
    """The patterns of one benefit, by the kind of layer they start at, and the layers to try."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._anywhere = [entry for entry in entries if entry.pattern.root_layer is None]
        self._by_kind: dict[str, list[Entry]] = {}
        for kind in dict.fromkeys(kind for entry in entries for kind in entry.pattern.root_layer or ()):
            self._by_kind[kind] = [e for e in entries if kind in (e.pattern.root_layer or (kind,))]
        self._reach = {kind: _reach(held) for kind, held in self._by_kind.items()}
        self._reach_anywhere = _reach(self._anywhere)
        self._waiting: deque[ir.Node] = deque()
        self._queued: set[ir.Node] = set()
        # Layers of which a pattern said no and cannot tell what would change that; after how many rewrites.
        self.undecided: dict[ir.Node, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def entries(self, kind: str) -> list[Entry]:
        """The patterns that may start at a layer of this kind."""
        return self._by_kind.get(kind, self._anywhere)

    def push(self, node: ir.Node, kind: str, distance: int = 0) -> None:
        """Queue a layer, if a pattern may start at it that looks further than `distance` layers up."""
        if distance < self._reach.get(kind, self._reach_anywhere) and node not in self._queued:
            self._queued.add(node)
            self._waiting.append(node)

    def pop(self) -> ir.Node:
        node = self._waiting.popleft()
        self._queued.discard(node)
        return node


def _reach(entries: Sequence[Entry]) -> float:
    """The number of layers that the patterns look at, counted upwards from where they start."""
    return max((math.inf if (reach := e.pattern.reach) is None else reach for e in entries), default=0)


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
        benefits = sorted({entry.benefit for entry in entries}, reverse=True)
        self._levels = [_Level([e for e in entries if e.benefit == benefit]) for benefit in benefits]
        self._reach = max((entry.pattern.reach or 1 for entry in entries), default=1)
        self._limit = limit
        self._budget = 1000 + 20 * len(net) if budget is None else budget
        self._strict = strict
        self._log = RewriteLog()
        self._history: dict[ir.Node, _Replaced] = {}  # of layers that rewrites made
        self._banned: set[tuple[str, ir.Node]] = set()

    def run(self) -> RewriteLog:
        """Rewrite until nothing matches, or `limit` rewrites are made; then verify the links."""
        log = self._log
        with net_guard(self.net):
            self._push(self.net.order.complete())
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

    def _push(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            kind = kind_of(node)
            for level in self._levels:
                level.push(node, kind)

    def _ask_again(self) -> bool:
        """Queue the layers of which no pattern can say what would change its mind, if anything did change."""
        fired, asked = len(self._log), False
        for level in self._levels:
            stale = [node for node, then in level.undecided.items() if then < fired]
            for node in stale:
                del level.undecided[node]
                if node.graph is self.net.graph:
                    level.push(node, kind_of(node))
                    asked = True
        return asked

    def _work(self, level: _Level) -> None:
        """Try the layers of one level, until a rewrite may have queued some at a higher one."""
        while level:
            node = level.pop()
            if node.graph is not self.net.graph:
                continue  # gone since it was queued
            kind, fed = kind_of(node), None
            for entry in level.entries(kind):
                if groups := entry.pattern.fed_by.get(kind):
                    if fed is None:
                        fed = {maker.op_type for maker in node.predecessors()}
                    if any(group.isdisjoint(fed) for group in groups):
                        continue
                if self._try(level, entry, node):
                    return

    def _try(self, level: _Level, entry: Entry, node: ir.Node) -> bool:
        """Ask a pattern about a layer, and let it act; whether it did."""
        pattern, layer = entry.pattern, Layer(node)
        try:
            found = pattern.find(layer)
        except Exception as error:
            self._fail_to_ask(entry, node, error)
            return False
        if not found:
            if pattern.reach is None:
                level.undecided[node] = len(self._log)
            return False
        if (entry.label, node) in self._banned:
            return False
        if self._limit is not None and len(self._log) >= self._limit:
            self._log.exhausted = True
            return True
        return self._act(level, entry, node, found)

    def _act(self, level: _Level, entry: Entry, node: ir.Node, found: Any) -> bool:
        label, inputs = entry.label, node.inputs
        loop = self._loop(label, node)
        try:
            change = attempt(self.net, entry.pattern, node, found, keep=loop is None)
        except RewriteError as error:
            if self._strict:
                raise
            self._log.broken.append(str(error))
            self._banned.add((label, node))
            return False
        if isinstance(change, Refusal):
            if entry.pattern.reach is None or entry.pattern.refuses_from_afar:
                level.undecided[node] = len(self._log)
            return False
        if loop is not None:
            raise RewriteError(loop)
        self._log.write(label, node, change.removed, change.made)
        if len(self._log) > self._budget:
            self._no_end()
        for new in change.made:
            before = self._history.get(node)
            self._history[new] = _Replaced(label, node.op_type, inputs, node.attributes, before)
        seeds = changed_layers(self.net.graph, change)
        for near, distance in distances_below(self.net.graph, seeds, self._reach).items():
            kind = kind_of(near)
            for each in self._levels:
                each.push(near, kind, distance)
        return True

    def _fail_to_ask(self, entry: Entry, node: ir.Node, error: Exception) -> None:
        """A pattern failed where it was only asked whether it matches."""
        where = f"layer {node.name} ({node.op_type})"
        message = f"pattern {entry.pattern.name!r} could not be asked about {where}: {error}"
        if self._strict:
            raise RewriteError(message) from error
        if message not in self._log.broken:
            self._log.broken.append(message)

    def _no_end(self) -> None:
        recent = Counter(one.pattern for one in self._log.fired[-200:])
        labels = ", ".join(f"{name!r} ({count})" for name, count in recent.most_common(4))
        raise RewriteError(f"{self._budget} rewrites and no end; of the last 200 came from {labels}")

    def _loop(self, label: str, node: ir.Node) -> str | None:
        """What to say if a pattern acts on a layer that it replaced before, just as it is."""
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
