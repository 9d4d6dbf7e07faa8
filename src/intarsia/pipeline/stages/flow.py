"""What flows through a graph: where it may be cut, and which values then cross."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from intarsia.pipeline.stages.signature import tensor_spec
from intarsia.pipeline.stages.trace import Trace

_RANDOM = torch.Tag.nondeterministic_seeded
_ALIAS = torch.Tag.maybe_aliasing_or_mutating


@dataclass(frozen=True)
class Flow:
    """A trace, read as a line of nodes with values flowing along it.

    A cut at `i` falls before node `i`. Values that depend on no input and no parameter (masks, position
    tables, lengths) are *replayed*: each stage that needs one computes it anew, so it never crosses.
    """

    trace: Trace

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The computing nodes in order."""
        return self.trace.nodes

    @cached_property
    def index(self) -> Mapping[fx.Node, int]:
        """Where each node stands; inputs stand before the first."""
        return dict.fromkeys(self.trace.inputs, -1) | {n: i for i, n in enumerate(self.nodes)}

    @cached_property
    def replayed(self) -> frozenset[fx.Node]:
        """The nodes a stage computes anew rather than receives."""
        written = self.written
        found: set[fx.Node] = set()
        for node in self.nodes:
            if is_length(node):
                found.add(node)  # read from any tensor at hand that has the same length
            elif not _is_pure(node) or node in written:
                continue
            elif all(self._free(a, found, written) for a in node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """Where a cut may fall: never between a value and its change in place, nor inside a bundle."""
        closed = [False] * (len(self.nodes) + 1)
        for first, last in [*self._bundles(), *self._changes()]:
            for i in range(first + 1, last + 1):
                closed[i] = True
        return tuple(i for i in range(1, len(self.nodes)) if not closed[i])

    @cached_property
    def last_use(self) -> Mapping[fx.Node, int]:
        """The last node (by index) that needs each crossing value; results are needed at the end."""
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            if node in self.replayed:
                continue
            for value in self.needs(node):
                last[value] = i
        for node in self.trace.results:
            for value in self.sources(node):
                last[value] = len(self.nodes)
        return last

    def needs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values a node cannot be computed without: its inputs, seen through replayed nodes."""
        seen: dict[fx.Node, None] = {}
        for value in node.all_input_nodes:
            for source in self.sources(value):
                seen[source] = None
        return tuple(seen)

    def sources(self, value: fx.Node) -> tuple[fx.Node, ...]:
        """The value itself; for a replayed node, what replaying it needs, lengths left out."""
        if value.op == "get_attr" or value in self.trace.states:
            return ()
        if value not in self.replayed:
            return (value,)
        if is_length(value):
            return ()
        seen: dict[fx.Node, None] = {}
        for a in value.all_input_nodes:
            for source in self.sources(a):
                seen[source] = None
        return tuple(seen)

    def crossing(self, cut: int) -> tuple[fx.Node, ...]:
        """The values made before `cut` and needed at or behind it, in the order they were made."""
        return tuple(v for v, last in self._spans if self.index[v] < cut <= last)

    def crossing_bytes(self) -> list[int]:
        """The bytes that would cross at every position 0 .. n, at the lengths of the example."""
        total = [0] * (len(self.nodes) + 2)
        for value, last in self._spans:
            size = value_bytes(value, self.trace)
            total[self.index[value] + 1] += size
            total[last + 1] -= size
        running, out = 0, []
        for delta in total[:-1]:
            running += delta
            out.append(running)
        return out

    @cached_property
    def _spans(self) -> tuple[tuple[fx.Node, int], ...]:
        return tuple(sorted(self.last_use.items(), key=lambda item: self.index[item[0]]))

    def _free(self, value: fx.Node, found: set[fx.Node], written: set[fx.Node]) -> bool:
        if value in found or value.op == "get_attr":
            return True
        state = self.trace.states.get(value)
        # A buffer can be read anywhere; a parameter's gradient must come back to one place.
        return state is not None and not state.tensor.requires_grad and value not in written

    @cached_property
    def written(self) -> set[fx.Node]:
        """Every value whose memory some node changes."""
        roots = {root for node in self.nodes for value in _changed(node) for root in _roots(value)}
        return {n for n in [*self.trace.states, *self.trace.inputs, *self.nodes] if _roots(n) & roots}

    def _bundles(self) -> Iterable[tuple[int, int]]:
        for node in self.nodes:
            items = [self.index[u] for u in node.users if u.target is operator.getitem]
            if items:
                yield self.index[node], max(items)

    def _changes(self) -> Iterable[tuple[int, int]]:
        """From the making of a value to its last change; for a state, from its first reader to its last."""
        for node in self.nodes:
            for value in _changed(node):
                for root in _roots(value):
                    if root in self.trace.states:
                        users = [self.index[u] for u in root.users if u in self.index]
                        yield min(users), max([*users, self.index[node]])
                    else:
                        yield self.index[root], self.index[node]


def is_length(node: fx.Node) -> bool:
    """Whether a node's value is a size or a number made of sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def value_bytes(node: fx.Node, trace: Trace) -> int:
    """The bytes of a node's value, at the lengths of the example."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tensor_spec(node.name, value).bytes(trace.signature.example)
    if isinstance(value, tuple | list):
        parts = [v for v in value if isinstance(v, torch.Tensor)]
        return sum(tensor_spec(node.name, v).bytes(trace.signature.example) for v in parts)
    return 8


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return all(_is_pure(n) for n in _bodies(node))
    schema = _schema(node)
    if schema is None or schema.is_mutable:
        return False
    if isinstance(node.target, torch._ops.OpOverload) and _RANDOM in node.target.tags:
        return _is_quiet(node)
    return True


def _is_quiet(node: fx.Node) -> bool:
    """Whether a random operator draws nothing this time (dropout outside training)."""
    if node.target is not torch.ops.aten.dropout.default:
        return False
    _, p, train = node.args
    return train is False or p in (0, 0.0)


def _bodies(node: fx.Node) -> list[fx.Node]:
    owner = node.graph.owning_module
    found: list[fx.Node] = []
    for value in node.all_input_nodes:
        if value.op == "get_attr" and owner is not None:
            body = operator.attrgetter(str(value.target))(owner)
            if isinstance(body, fx.GraphModule):
                found += [n for n in body.graph.nodes if n.op == "call_function"]
    return found


def _changed(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments a node changes in place."""
    schema = _schema(node)
    if schema is None:
        return () if _is_pure(node) else node.all_input_nodes
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        found += [
            v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, fx.Node)
        ]
    if _may_alias(node):
        # batch_norm's schema does not say that in training it updates the running statistics.
        found += [v for v in node.all_input_nodes if _is_buffer(v)]
    return found


def _roots(node: fx.Node) -> frozenset[fx.Node]:
    """The values whose memory a node's value may share."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        value = waiting.pop()
        shared = _shared(value)
        if shared:
            waiting += shared
        else:
            found.add(value)
    return frozenset(found)


def _shared(node: fx.Node) -> list[fx.Node]:
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return [v for v in node.args[:1] if isinstance(v, fx.Node)]
    schema = _schema(node)
    if schema is None:
        return []
    if any(r.alias_info is not None for r in schema.returns) or _may_alias(node):
        return [v for v in node.args[:1] if isinstance(v, fx.Node)]
    return []


def _may_alias(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and _ALIAS in node.target.tags


def _is_buffer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and not value.requires_grad
