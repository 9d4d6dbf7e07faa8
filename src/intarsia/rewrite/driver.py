"""The worklist: every pattern at every layer it could match, highest benefit first, to a fixpoint."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from intarsia.errors import RewriteError
from intarsia.network import Network, net_guard
from intarsia.network.journal import Moved
from intarsia.network.make import nodes_of
from intarsia.network.raw import kind_of
from intarsia.network.uses import readers, use_count
from intarsia.network.verify import verify
from intarsia.rewrite.log import Fired, RewriteLog
from intarsia.rewrite.pattern import PatternRewriter
from intarsia.rewrite.transaction import Change, attempt

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
        self.waiting: deque[tuple[ir.Node, list[Entry]]] = deque()
        self.queued: set[ir.Node] = set()
        self.left = 0  # of the layers waiting, how many of the sweep over the whole network

    def push(self, node: ir.Node, kind: str) -> bool:
        entries = self.by_kind.get(kind, self.anywhere)
        if not entries:
            return False
        if node not in self.queued:
            self.queued.add(node)
            self.waiting.append((node, entries))
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
        kinds = {kind for level in self.levels for kind in level.by_kind}
        self.wanted = None if any(level.anywhere for level in self.levels) else kinds
        self.reach = max((entry.pattern.reach for entry in entries), default=0)
        self.limit = limit
        self.budget = 1000 + 20 * len(net) if budget is None else budget
        self.strict = strict
        self.log = RewriteLog()
        self.pasts: dict[ir.Node, _Past] = {}
        self.banned: set[tuple[str, ir.Node]] = set()

    def run(self) -> RewriteLog:
        """Rewrite until nothing matches, or `limit` rewrites are made; then verify the whole network."""
        with net_guard(self.net), _no_collection():
            changed = True
            while changed and not self.log.exhausted:
                self._push_all()
                before = len(self.log)
                top = self.levels[0] if self.levels else None
                while not self.log.exhausted:
                    for level in self.levels:  # the highest with layers to try
                        if level.waiting:
                            break
                    else:
                        break
                    sweeping = level is top and level.left > 0
                    node, entries = level.waiting.popleft()
                    level.left -= 1
                    level.queued.discard(node)
                    self._visit(node, entries, sweeping)
                changed = len(self.log) > before
            if self.log.fired:
                self.net.drop_unused_constants()
                verify(self.net, types=False)
        return self.log

    def _push_all(self) -> None:
        wanted = self.wanted
        for node in nodes_of(self.net.graph):
            if wanted is None or node._op_type in wanted or node._domain:
                self._push(node)
        for level in self.levels:
            level.left = len(level.waiting)

    def _visit(self, node: ir.Node, entries: list[Entry], sweeping: bool) -> None:
        net = self.net
        for entry in entries:
            if node._graph is not net.graph:
                return  # gone since it was queued
            found = entry.pattern.find_at(node)
            if not found or (self.banned and (entry.label, node) in self.banned):
                continue
            if self.limit is not None and len(self.log) >= self.limit:
                self.log.exhausted = True
                return
            if self.pasts:
                self._check_past(entry.label, node)
            inputs = node._inputs
            try:
                change = attempt(net, entry.pattern, node, found)
            except RewriteError as error:
                if self.strict:
                    raise
                self.log.broken.append(str(error))
                self.banned.add((entry.label, node))
                continue
            if type(change) is Change:
                self._settle(entry.label, node, inputs, change, sweeping)
                return

    def _check_past(self, label: str, node: ir.Node) -> None:
        """An error if a layer about to be replaced was replaced before just as it is."""
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
                raise RewriteError(
                    f"patterns {names} feed each other: layer {node.name} ({node.op_type}) is back"
                    " as it was; make one of them refuse what the other makes"
                )
            step = step.before

    def _settle(
        self, label: str, root: ir.Node, inputs: Sequence[ir.Value | None], change: Change, sweeping: bool
    ) -> None:
        """Write down a rewrite that stands, and queue what it may have made matchable."""
        made, fired = change.made, self.log.fired
        entry = Fired(label, root, [edit[0] for edit in change.removed], made)
        entry.stamp(self.net.traced)
        fired.append(entry)
        if len(fired) > self.budget:
            recent = Counter(one.pattern for one in fired[-200:])
            labels = ", ".join(f"{name!r} ({count})" for name, count in recent.most_common(4))
            raise RewriteError(f"{self.budget} rewrites and no end; of the last 200 came from {labels}")
        wanted = self.wanted
        for node in made:
            # Most layers are of a kind at which no pattern starts.
            if (wanted is None or node._op_type in wanted or node._domain) and self._push(node):
                before = self.pasts.get(root)
                self.pasts[node] = _Past(label, root.op_type, inputs, root.attributes, before)
        near = self._less_read(change, sweeping)
        if not sweeping:
            for edit in change.edits:
                if isinstance(edit, Moved):
                    near.update(dict.fromkeys([use[0] for use in edit.uses[:_NEAR]]))
            near.update(dict.fromkeys(made))
        if near:
            self._push_near(near)

    def _less_read(self, change: Change, sweeping: bool) -> dict[ir.Node, None]:
        """The only readers left of what the removed layers read: a pattern may have waited for that."""
        near: dict[ir.Node, None] = {}
        for _, inputs, label, _ in change.removed:
            for value in inputs:
                if value is not None and len(value._uses) == 1 and value._const_value is None:
                    ((reader, _),) = value._uses
                    # In the first sweep of the highest level all that stands below is still to be visited.
                    if reader not in change.made and not (sweeping and self.net.order.of(reader) > label):
                        near[reader] = None
        return near

    def _push(self, node: ir.Node) -> bool:
        """Queue a layer wherever a pattern starts at its kind; whether one does."""
        kind, found = kind_of(node), False
        for level in self.levels:
            found |= level.push(node, kind)
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
