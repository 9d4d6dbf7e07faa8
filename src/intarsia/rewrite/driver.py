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
from intarsia.network.verify import verify_links
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
        self.waiting: deque[ir.Node] = deque()
        self.queued: set[ir.Node] = set()
        self.left = 0  # of the layers waiting, how many of the sweep over the whole network

    def fill(self, nodes: list[ir.Node]) -> None:
        """Queue all these layers, where a pattern starts at their kind; nothing is queued yet."""
        kinds = self.by_kind
        if not self.anywhere:
            nodes = [n for n in nodes if (kind_of(n) if n._domain else n._op_type) in kinds]
        self.waiting, self.queued, self.left = deque(nodes), set(nodes), len(nodes)

    def push(self, node: ir.Node) -> bool:
        """Queue a layer; false if no pattern starts at its kind."""
        if not self.anywhere and (kind_of(node) if node._domain else node._op_type) not in self.by_kind:
            return False
        if node not in self.queued:
            self.queued.add(node)
            self.waiting.append(node)
        return True

    def pop(self) -> tuple[ir.Node, list[Entry]]:
        """The next layer, and the patterns to be tried at it."""
        node = self.waiting.popleft()
        self.queued.discard(node)
        self.left -= 1
        return node, self.by_kind.get(kind_of(node) if node._domain else node._op_type, self.anywhere)


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
        self.reach = max((entry.pattern.reach for entry in entries), default=0)
        self.limit = limit
        self.budget = 1000 + 20 * len(net) if budget is None else budget
        self.strict = strict
        self.log = RewriteLog()
        self.pasts: dict[ir.Node, _Past] = {}
        self.banned: set[tuple[str, ir.Node]] = set()

    def run(self) -> RewriteLog:
        """Rewrite until nothing matches, or `limit` rewrites are made; then verify the links."""
        with net_guard(self.net), _no_collection():
            changed = True
            while changed and not self.log.exhausted:
                nodes = nodes_of(self.net.graph)
                for level in self.levels:
                    level.fill(nodes)
                before = len(self.log)
                top = self.levels[0] if self.levels else None
                while not self.log.exhausted:
                    for level in self.levels:  # the highest with layers to try
                        if level.waiting:
                            break
                    else:
                        break
                    sweeping = level is top and level.left > 0
                    self._visit(*level.pop(), sweeping)
                changed = len(self.log) > before
            if self.log.fired:
                self.net.drop_unused_constants()
                verify_links(self.net.graph)
        return self.log

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
        for node in made:
            if self._push(node):
                before = self.pasts.get(root)
                self.pasts[node] = _Past(label, root.op_type, inputs, root.attributes, before)
        # One reader less may be what a pattern waited for.
        near: dict[ir.Node, None] = {}
        for value in change.lone:
            # In the first sweep of the highest level all that stands below is still to be visited.
            for reader, _ in value._uses:
                if reader not in made and not (sweeping and self._is_below(reader, change)):
                    near[reader] = None
        if not sweeping:
            for edit in change.edits:
                if isinstance(edit, Moved):
                    near.update(dict.fromkeys([use[0] for use in edit.uses[:_NEAR]]))
            near.update(dict.fromkeys(made))
        if near:
            self._push_near(near)

    def _is_below(self, node: ir.Node, change: Change) -> bool:
        label = self.net.order.of(node)
        return all(edit.label < label for edit in change.removed)

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
