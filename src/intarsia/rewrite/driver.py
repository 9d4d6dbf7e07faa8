"""The worklist: every pattern at every layer it could match, highest benefit first, to a fixpoint."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Network, net_guard
from intarsia.network.edit.journal import Edit, Moved, Removed
from intarsia.network.edit.make import nodes_of
from intarsia.network.edit.raw import kind_of
from intarsia.network.edit.uses import readers, use_count
from intarsia.network.verify import verify_links
from intarsia.rewrite.log import RewriteLog
from intarsia.rewrite.pattern import PatternRewriter
from intarsia.rewrite.transaction import attempt

_NEAR = 32  # layers looked at again after one rewrite; a last scan finds what this misses


@dataclass(frozen=True)
class Entry:
    """A pattern as a manager holds it."""

    label: str
    pattern: PatternRewriter
    benefit: float


class _Past(NamedTuple):
    """A layer that was replaced, and what had replaced an earlier one to make it."""

    label: str
    op_type: str
    inputs: Sequence[ir.Value | None]
    attributes: Mapping[str, ir.Attr]
    before: _Past | None


class _Level:
    """The patterns of one benefit, by the kind of layer they start at, and the layers to try."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.anywhere = [entry for entry in entries if entry.pattern.root_layer is None]
        self.by_kind: dict[str, list[Entry]] = {}
        for kind in dict.fromkeys(kind for entry in entries for kind in entry.pattern.root_layer or ()):
            self.by_kind[kind] = [e for e in entries if kind in (e.pattern.root_layer or (kind,))]
        self.waiting: deque[ir.Node] = deque()
        self.queued: set[ir.Node] = set()  # those waiting that came after the sweep began
        self.left = 0  # of the layers waiting, how many of the sweep over the whole network

    def fill(self, nodes: list[ir.Node]) -> None:
        """Queue all these layers, where a pattern starts at their kind; nothing is queued yet."""
        kinds = self.by_kind
        if not self.anywhere:
            nodes = [n for n in nodes if (kind_of(n) if n._domain else n._op_type) in kinds]
        self.waiting, self.left = deque(nodes), len(nodes)

    def push(self, node: ir.Node) -> bool:
        """Queue a layer; false if no pattern starts at its kind."""
        if not self.anywhere and (kind_of(node) if node._domain else node._op_type) not in self.by_kind:
            return False
        if node not in self.queued:
            self.queued.add(node)
            self.waiting.append(node)
        return True


def _plain(attributes: Mapping[str, ir.Attr]) -> dict[str, object]:
    return {name: attr.value for name, attr in attributes.items()}


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
        self.levels = [_Level([e for e in entries if e.benefit == benefit]) for benefit in benefits]
        self.kinds = {kind for level in self.levels for kind in level.by_kind}
        self.anywhere = any(level.anywhere for level in self.levels)
        self.reach = max((entry.pattern.reach for entry in entries), default=0)
        self.limit = limit
        self.budget = 1000 + 20 * len(net) if budget is None else budget
        self.strict = strict
        self.log = RewriteLog()
        self.pasts: dict[ir.Node, _Past] = {}
        self.banned: set[tuple[str, ir.Node]] = set()

    def run(self) -> RewriteLog:
        """Rewrite until nothing matches, or `limit` rewrites are made; then verify the links."""
        log = self.log
        with net_guard(self.net), _no_collection():
            nodes, before = self.net.order.complete(), -1
            while before < len(log) and not log.exhausted:
                if before >= 0:
                    nodes = nodes_of(self.net.graph)
                before = len(log)
                for level in self.levels:
                    level.fill(nodes)
                while not log.exhausted:
                    for level in self.levels:  # the highest with layers to try
                        if level.waiting:
                            break
                    else:
                        break
                    self._work(level)
            if len(log):
                if self.net.journal is None:  # or what is going on could not be undone
                    self.net.drop_unused_constants()
                verify_links(self.net.graph)
        return log

    def _work(self, level: _Level) -> None:
        """Try the layers of one level, until a rewrite may have queued some at a higher one."""
        graph, waiting, queued = self.net.graph, level.waiting, level.queued
        by_kind, anywhere = level.by_kind, level.anywhere
        top = level is self.levels[0]
        while waiting:
            node = waiting.popleft()
            if queued:
                queued.discard(node)
            level.left -= 1
            if node._graph is not graph:
                continue  # gone since it was queued
            for entry in by_kind.get(kind_of(node) if node._domain else node._op_type, anywhere):
                try:
                    found = entry.pattern.find_at(node)
                except Exception as error:
                    self._broken(entry, node, error)
                    continue
                if found and self._rewrite(entry, node, found, top and level.left >= 0):
                    break
            else:
                continue
            if not top or self.log.exhausted:
                return

    def _rewrite(self, entry: Entry, node: ir.Node, found: Any, sweeping: bool) -> bool:
        """Let a pattern act where it matches; whether this layer is done with."""
        label, log, inputs = entry.label, self.log, node._inputs
        if self.banned and (label, node) in self.banned:
            return False
        if self.limit is not None and len(log) >= self.limit:
            log.exhausted = True
            return True
        loop = self._loop(label, node) if self.pasts else None
        try:
            change = attempt(self.net, entry.pattern, node, found, keep=loop is None)
        except RewriteError as error:
            if self.strict:
                raise
            log.broken.append(str(error))
            self.banned.add((label, node))
            return False
        if type(change) is not tuple:
            return False
        if loop is not None:
            raise RewriteError(loop)
        edits, made, replaced, lone = change
        traced = self.net.traced
        known = [node, *(edit[1] for edit in edits if edit[0] is Removed)] if traced else ()
        log.write(label, node, replaced, made, known)
        if len(log.events) > self.budget:
            self._no_end()
        for new in made:
            if (new._op_type in self.kinds or new._domain or self.anywhere) and self._push(new):
                before = self.pasts.get(node)
                self.pasts[new] = _Past(label, node.op_type, inputs, node.attributes, before)
        if lone or not sweeping:
            self._queue_near(edits, made, lone, sweeping)
        return True

    def _broken(self, entry: Entry, node: ir.Node, error: Exception) -> None:
        """A pattern failed where it was only asked whether it matches."""
        where = f"layer {node.name} ({node.op_type})"
        told = f"pattern {entry.pattern.name!r} could not be asked about {where}: {error}"
        if self.strict:
            raise RewriteError(told) from error
        if told not in self.log.broken:
            self.log.broken.append(told)

    def _no_end(self) -> None:
        recent = Counter(one.pattern for one in self.log.fired[-200:])
        labels = ", ".join(f"{name!r} ({count})" for name, count in recent.most_common(4))
        raise RewriteError(f"{self.budget} rewrites and no end; of the last 200 came from {labels}")

    def _loop(self, label: str, node: ir.Node) -> str | None:
        """What to say if a pattern acts on a layer that it replaced before, just as it is."""
        step = self.pasts.get(node)
        labels = [label]
        while step is not None and len(labels) < 64:
            labels.append(step.label)
            if (
                step.label == label
                and step.op_type == node.op_type
                and step.inputs == node._inputs
                and _plain(step.attributes) == _plain(node.attributes)
            ):
                names = " and ".join(repr(name) for name in dict.fromkeys(reversed(labels)))
                return (
                    f"patterns {names} feed each other: layer {node.name} ({node.op_type}) is back"
                    " as it was; make one of them refuse what the other makes"
                )
            step = step.before
        return None

    def _queue_near(
        self,
        edits: list[Edit],
        made: list[ir.Node],
        lone: list[ir.Value],
        sweeping: bool,
    ) -> None:
        """Queue what a rewrite may have made matchable."""
        near: dict[ir.Node, None] = {}
        # One reader less may be what a pattern waited for.
        for value in lone:
            for use in value._uses:
                reader = use[0]
                if reader not in made and reader._graph is self.net.graph:  # not in a body
                    near[reader] = None
        if sweeping and near:
            # All that stands below is still to be visited.
            last = max((edit[3] for edit in edits if edit[0] is Removed), default=0)
            near = {node: None for node in near if self.net.order.of(node) < last}
        if not sweeping:
            for kind, *fields in edits:
                if kind is Moved:
                    near.update(dict.fromkeys([use[0] for use in Moved(*fields).uses[:_NEAR]]))
            near.update(dict.fromkeys(made))
        if near:
            self._push_near(near)

    def _push(self, node: ir.Node) -> bool:
        """Queue a layer wherever a pattern starts at its kind; whether one does."""
        found = False
        for level in self.levels:
            if level.push(node):
                found = True
        return found

    def _push_near(self, near: dict[ir.Node, None]) -> None:
        """Queue these layers and those below them, as far down as a pattern reaches."""
        front = list(near)
        for _ in range(self.reach - 1):
            below = []
            for node in front:
                for value in node.outputs:
                    if use_count(value) <= _NEAR:
                        below += [reader for reader in readers(value) if reader not in near]
            if not below:
                break
            for node in below:
                near[node] = None
            if len(near) > _NEAR:
                break
            front = below
        for node in near:
            self._push(node)


@contextmanager
def _no_collection() -> Iterator[None]:
    # Each full collection walks every node of a large network, and rewriting makes many objects.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            # What was made is old now: the next young collection need not walk all of it.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
