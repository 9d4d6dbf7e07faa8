"""Trying one pattern at one layer: the rewrite is checked, or undone.

Edits are recorded in a journal, so that only edited layers are checked, and edits are undone one by one. The
cost depends on the rewrite, and not on the size of the network.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from intarsia.errors import IntarsiaError, NetworkError, RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.attributes import from_attr, owner_in, rounded_attribute
from intarsia.network.edit.journal import (
    BodyTaken,
    ConstantAdded,
    Edit,
    InputReplaced,
    LayerAdded,
    LayerRemoved,
    OutputMarked,
    UsesReplaced,
)
from intarsia.network.edit.redirect import is_dead, remove_dead, undo
from intarsia.network.infer import Types, has_rule, infer
from intarsia.network.value import Shape
from intarsia.network.verify import merged, shape_clash, verify_layer
from intarsia.rewrite.pattern import PatternRewriter, Refusal


@dataclass(frozen=True)
class Change:
    """A completed rewrite: its edits, the layers it added and those it removed."""

    edits: Sequence[Edit]
    made: Sequence[ir.Node]
    removed: Sequence[ir.Node]


def attempt(
    net: Network, pattern: PatternRewriter, node: ir.Node, match: Any, *, keep: bool = True
) -> Change | Refusal:
    """Apply a pattern to a layer; returns the rewrite, or the reason for none.

    The network is under guard. The edits are undone if the pattern refuses, breaks the network
    (RewriteError), or `keep` is false.
    """
    edits: list[Edit] = []
    outer, net.journal = net.journal, edits  # a pattern may run others
    anchor, net.anchor = net.anchor, node
    done = False
    try:
        result = pattern.perform(Layer(node), match)
        if not result:
            refusal = Refusal("match_and_rewrite() returned a false value")
            return result if isinstance(result, Refusal) else refusal
        change = _finish(net, edits, pattern.keep_types)
        done = keep and isinstance(change, Change)
        return change
    except Exception as error:
        where = f"pattern {pattern.name!r} at layer {node.name} ({node.op_type})"
        raise RewriteError(f"{where} was undone: {last_line(error)}") from error
    finally:
        net.journal, net.anchor = None, anchor
        if not done:
            undo(net, edits)
        if outer is not None:
            net.journal = outer
            outer += edits if done else ()


def last_line(error: Exception) -> str:
    """The last line of an error's traceback; an error of ours gives its message alone."""
    return str(error) if isinstance(error, IntarsiaError) else f"{type(error).__name__}: {error}"


def _finish(net: Network, edits: list[Edit], keep_types: bool) -> Change | Refusal:
    """Check the edited layers, and remove layers that nothing reads any more.

    Arity, types, uses and outputs are checked here; the network itself refuses cycles. A rewrite that loses
    digits of float64 is refused.
    """
    if not edits:
        raise RewriteError("it reports a rewrite, but it changed nothing")
    added = [edit.node for edit in edits if isinstance(edit, LayerAdded)]
    dead = [node for node in added if node.graph is not None and is_dead(node)]
    retyped: list[ir.Node] = []
    for edit in edits:
        match edit:
            case LayerAdded(node=node, inferred=inferred):
                if not inferred and node.graph is not None and not is_dead(node):
                    verify_layer(node)
            case UsesReplaced(old=old, new=new):
                dead += _makers([old])
                if not _same_type(net, old, new, keep_types):
                    retyped += [use.node for use in new.uses()]
            case InputReplaced(node=node, old=before, new=new):
                dead += _makers([before])
                if node.graph is not None and not (_alike(before, new) or _same_made(node, keep_types)):
                    retyped.append(node)
            case LayerRemoved(node=node, inputs=inputs, released=released):
                if not is_dead(node):
                    raise NetworkError(f"layer {node.name} was removed and is still read")
                dead += _makers([*inputs, *(use.value for use in released)])
            case OutputMarked(value=value):
                raise NetworkError(f"it made {value.name} an output of the network")
    if retyped:
        _infer_below(net, retyped)
    remove_dead(net, dead)
    # What was made and not needed is not part of the story.
    layers = [node for node in added if node.graph is net.graph]
    for node in layers:
        if lost := rounded_attribute(node):
            return Refusal(f"{node.op_type} of float64 would have {lost}")
    fresh = set(added)
    removed = [e.node for e in edits if isinstance(e, LayerRemoved) and e.node not in fresh]
    idle = all(isinstance(edit, LayerAdded | BodyTaken | LayerRemoved | ConstantAdded) for edit in edits)
    if idle and not (layers or removed):
        raise RewriteError("it reports a rewrite, but it changed nothing")
    return Change(edits, layers, removed)


def _makers(values: Sequence[ir.Value | None]) -> list[ir.Node]:
    return [maker for value in values if value is not None and (maker := value.producer()) is not None]


def _same_type(net: Network, old: ir.Value, new: ir.Value, keep_types: bool) -> bool:
    """Whether readers see the same type as before; the known sizes of both shapes are merged."""
    was, now = Tensor.of(old), Tensor.of(new)
    if was.dtype == now.dtype and was.shape == now.shape:
        return True
    if was.dtype != now.dtype:
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, which has another dtype")
        return False
    if clash := shape_clash(was.shape, now.shape) or _lost_symbol(was.shape, now.shape):
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, which has another shape: {clash}")
        return False
    both = merged(was.shape, now.shape)
    if both != now.shape:
        net.set_type(new, was.dtype, both)
    return True


def _alike(old: ir.Value | None, new: ir.Value) -> bool:
    return old is not None and old.dtype == new.dtype and Tensor.of(old).shape == Tensor.of(new).shape


def _same_made(node: ir.Node, keep_types: bool) -> bool:
    """Whether a layer with new inputs has results of the same type as before."""
    for value, (dtype, shape) in zip(node.outputs, _inferred(node), strict=False):
        was = Tensor.of(value)
        if was.dtype != dtype or shape_clash(was.shape, shape) or _lost_symbol(was.shape, shape):
            if keep_types:
                raise NetworkError(
                    f"{was!r} is {dtype.name} {list(shape)} of what layer {node.name} reads now"
                )
            return False
    return True


def _lost_symbol(was: Shape, now: Shape) -> str | None:
    """Two different symbols, or a symbol and a size, are not known to be equal."""
    for a, b in zip(was, now, strict=True):
        if a != b and a is not None and b is not None:
            return f"{a} against {b}"
    return None


def _infer_below(net: Network, readers: list[ir.Node]) -> None:
    """Infer these layers again, whose inputs changed on purpose, and all layers that depend on them.

    Each is looked at once, after all that it is made from.
    """
    order, seen = net.order, set[ir.Node]()
    waiting: list[tuple[int, ir.Node]] = []  # no two have one label

    def wait(node: ir.Node) -> None:
        reader = owner_in(net.graph, node)
        if reader is not None and reader not in seen:
            seen.add(reader)
            heapq.heappush(waiting, (order.of(reader), reader))

    for node in readers:
        wait(node)
    while waiting:
        _, node = heapq.heappop(waiting)
        for value, (dtype, shape) in zip(node.outputs, _inferred(node), strict=False):
            if value.dtype == dtype and Tensor.of(value).shape == shape:
                continue
            net.set_type(value, dtype, shape)
            for use in value.uses():
                wait(use.node)


def _inferred(node: ir.Node) -> Types:
    """The result types of a layer for its current inputs."""
    if not has_rule(node.domain, node.op_type):
        raise NetworkError(f"no shape rule for {node.op_type}, which reads a tensor whose shape changed")
    inputs = [None if value is None else Tensor.of(value) for value in node.inputs]
    attributes = {name: from_attr(attr) for name, attr in node.attributes.items()}
    return infer(node.domain, node.op_type, inputs, attributes, len(node.outputs))


# What fired where: the log of one rewriting run.


@dataclass(frozen=True)
class Fired:
    """One rewrite: the pattern, the layer it was found at, the layers it removed and those it added."""

    pattern: str
    root: ir.Node
    replaced: tuple[str, ...]
    nodes: tuple[ir.Node, ...]

    @property
    def layer(self) -> str:
        """The layer it was found at."""
        return str(self.root.name)

    @property
    def kind(self) -> str:
        return self.root.op_type

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(str(node.name) for node in self.nodes)

    @property
    def source(self) -> str:
        """The line of the model that the replaced layers come from; empty if it is unknown."""
        sources = (node.metadata_props.get("source", "") for node in (self.root, *self.nodes))
        return next(filter(None, sources), "")

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        replaced, added = (", ".join(names) or "nothing" for names in (self.replaced, self.made))
        return f"{self.pattern}: {replaced} -> {added}{where}"


@dataclass(frozen=True)
class Broken:
    """A rewrite that failed, because its pattern raised an exception or broke the network."""

    pattern: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass
class RewriteLog:
    """Every rewrite of a run in order, and those that failed.

    `exhausted` says that the run ended because `limit` rewrites were made.
    """

    fired: list[Fired] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    exhausted: bool = False

    def __len__(self) -> int:
        return len(self.fired)

    def write(self, pattern: str, root: ir.Node, removed: Sequence[ir.Node], made: Sequence[ir.Node]) -> None:
        """Record a rewrite and, on every new layer, its pattern and its origin."""
        replaced = tuple(str(node.name) for node in removed)
        self.fired.append(Fired(pattern, root, replaced, tuple(made)))
        if not made:
            return
        origins = [node.metadata_props for node in (root, *removed) if node.metadata_props]
        origin = next((each for each in origins if "source" in each), origins[0] if origins else {})
        for node in made:
            node.metadata_props.update({**origin, "pattern": pattern, "replaced": ", ".join(replaced)})

    def add(self, other: RewriteLog) -> None:
        """Add the entries of another run."""
        self.fired += other.fired
        self.broken += other.broken
        self.skipped |= other.skipped
        self.exhausted |= other.exhausted

    def counts(self) -> dict[str, int]:
        """How often each pattern fired."""
        return dict(Counter(entry.pattern for entry in self.fired))

    def failures(self) -> list[str]:
        """One sentence for each pattern that failed: where it first did, why, and at how many more layers."""
        failures = list(dict.fromkeys(self.broken))  # patterns are applied several times over
        counts = Counter(failure.pattern for failure in failures)
        first = {failure.pattern: failure for failure in reversed(failures)}
        return [
            str(first[name]) + (f" (and at {count - 1} more layers)" if count > 1 else "")
            for name, count in counts.items()
        ]

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.fired]
        lines += [f"undone: {reason}" for reason in self.broken]
        lines += [f"not used: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)
