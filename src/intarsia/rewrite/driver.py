"""The worklist: every pattern at every layer it could match, highest benefit first, to a fixpoint."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, net_guard
from intarsia.network.verify import verify_links
from intarsia.rewrite.index import Entry, PatternIndex, bits, changed_layers
from intarsia.rewrite.log import Broken, RewriteLog
from intarsia.rewrite.pattern import Refusal
from intarsia.rewrite.transaction import attempt, last_line

_LOOP = 64  # replacements of replacements that are looked at to find a loop


@dataclass(frozen=True)
class _Replaced:
    """A layer that was replaced, and what had replaced an earlier one to make it."""

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
        # Layers of which a pattern said no and cannot tell what would change that; after how many rewrites.
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
        """Queue the layers of which a pattern cannot say what would change its mind, if anything changed."""
        fired, asked = len(self._log), False
        for level in self._levels:
            stale = [asked_before for asked_before, then in level.undecided.items() if then < fired]
            for node, number in stale:
                del level.undecided[node, number]
                if node.graph is self.net.graph:
                    level.push(node, 1 << number)
                    asked = True
        return asked

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
        """Ask a pattern about a layer, and let it act; whether the layer is done with."""
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
        """Let a pattern act where it matches; whether it did."""
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
        """A pattern failed where it was only asked whether it matches."""
        where = f"layer {node.name} ({node.op_type})"
        message = f"pattern {entry.pattern.name!r} could not be asked about {where}: {last_line(error)}"
        if self._strict:
            raise RewriteError(message) from error
        failure = Broken(entry.label, message)
        if failure not in self._log.broken:
            self._log.broken.append(failure)

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
