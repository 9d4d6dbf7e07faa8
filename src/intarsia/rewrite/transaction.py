"""One try of one pattern at one layer: done and checked, or undone."""

from __future__ import annotations

import heapq
from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError, RewriteError
from intarsia.network import Network, Tensor
from intarsia.network.attributes import from_attr
from intarsia.network.bodies import owner_in
from intarsia.network.edit.journal import (
    Added,
    Constant,
    Edit,
    Marked,
    Moved,
    Owned,
    Redirected,
    Removed,
    Typed,
    undo,
)
from intarsia.network.edit.remove import remove_dead
from intarsia.network.edit.uses import is_dead
from intarsia.network.infer.registry import Made, has_rule, infer
from intarsia.network.network import Shape, raw_shape
from intarsia.network.verify import merged, shape_clash, verify_layer
from intarsia.rewrite.pattern import PatternRewriter, Refusal

# A rewrite that stands: all it did, the layers it made, the names of those it took out, tensors that may have
# one reader left.
Change = tuple[list[Edit], list[ir.Node], list[str], list[ir.Value]]


def attempt(
    net: Network, pattern: PatternRewriter, node: ir.Node, found: Any, *, keep: bool = True
) -> Change | Refusal:
    """Let a pattern act on a layer; what it did, or why it did not. The network is under guard.

    Whatever it did is undone if it says no, breaks the network (RewriteError), or `keep` is false.
    """
    edits: list[Edit] = []
    outer, net.journal = net.journal, edits  # a pattern may ask others while it acts
    anchor, net.anchor = net.anchor, node
    done = False
    try:
        said = pattern.act(net, node, found)
        if not said:
            return said if isinstance(said, Refusal) else Refusal("match_and_rewrite() said no")
        change = _settle(net, edits, pattern.keep_types)
        done = keep
        return change
    except Exception as error:
        where = f"pattern {pattern.name!r} at layer {node.name} ({node.op_type})"
        raise RewriteError(f"{where} was taken back: {error}") from error
    finally:
        net.journal, net.anchor = None, anchor
        if not done:
            undo(net, edits)
        if outer is not None:
            net.journal = outer
            outer += edits if done else ()


def _settle(net: Network, edits: list[Edit], keep_types: bool) -> Change:
    """Check what the edits touched, and take out what nothing reads any more.

    Arity, types, uses and outputs are checked here; the network itself refuses cycles.
    """
    if not edits:
        raise RewriteError("it said that it rewrote the layer and changed nothing")
    made: list[ir.Node] = []
    removed: list[str] = []
    dead: list[ir.Node] = []
    retyped: list[ir.Node] = []
    lone: list[ir.Value] = []
    graph, spare = net.graph, False
    for edit in edits:
        kind = edit[0]
        if kind is Added:
            _, node, inferred = edit
            if node._graph is None:
                spare = True
                continue
            for value in node._outputs:
                if value._uses or value._is_graph_output:
                    made.append(node)
                    if not inferred:
                        verify_layer(node)
                    break
            else:
                dead.append(node)
                spare = True
        elif kind is Moved:
            old, new = edit[1], edit[2]
            if old._producer is not None:
                dead.append(old._producer)
            was, now = old._type, new._type
            if old._shape is new._shape is not None and was and now and was._dtype is now._dtype:
                continue
            if not _same_type(net, old, new, keep_types):
                retyped += [use[0] for use in new._uses]
        elif kind is Redirected:
            _, node, _, old, new = edit
            if old is not None and old._producer is not None:
                dead.append(old._producer)
            if node.graph is not None and not (_alike(old, new) or _same_made(node, keep_types)):
                retyped.append(node)
        elif kind is Removed:
            _, node, inputs, _, _, released, _ = edit
            if not is_dead(node):
                raise NetworkError(f"layer {node.name} was removed and is still read")
            removed.append(str(node.name))
            dead += [value._producer for value in inputs if value is not None and value._producer]
            dead += [value._producer for *_, value in released if value._producer]
        elif kind is Marked:
            raise NetworkError(f"it made {edit[1].name} an output of the network")
    if retyped:
        _infer_below(net, retyped)
    if dead:
        removed += remove_dead(net, dead, lone)
    for node in made:
        if node._graph is not graph:
            spare = True
    if spare:  # what was made and not needed is no part of the story
        made = [node for node in made if node._graph is graph]
        new = {edit[1].name for edit in edits if edit[0] is Added}
        removed = [name for name in removed if name not in new]
        if all(edit[0] in (Added, Owned, Removed, Constant) for edit in edits) and not (made or removed):
            raise RewriteError("it said that it rewrote the layer and changed nothing")
    return edits, made, removed, lone


def _same_type(net: Network, old: ir.Value, new: ir.Value, keep_types: bool) -> bool:
    """Whether readers see the type they saw; what was known of either shape is kept."""
    was, now = Tensor.of(old), Tensor.of(new)
    if was.dtype != now.dtype:
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, of another dtype")
        return False
    if clash := shape_clash(was.shape, now.shape) or _lost_symbol(was.shape, now.shape):
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, of another shape: {clash}")
        return False
    both = merged(was.shape, now.shape)
    if both != now.shape:
        set_type(net, new, was.dtype, both)
    return True


def _alike(old: ir.Value | None, new: ir.Value) -> bool:
    return old is not None and old.dtype == new.dtype and Tensor.of(old).shape == Tensor.of(new).shape


def _same_made(node: ir.Node, keep_types: bool) -> bool:
    """Whether a layer that reads something else makes what it made."""
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


def set_type(net: Network, value: ir.Value, dtype: ir.DataType, shape: tuple[int | str | None, ...]) -> None:
    """Give a tensor another type or shape, so that it can be undone."""
    if net.journal is not None:
        net.journal.append((Typed, value, value.type, value.shape))
    value.type, value.shape = ir.TensorType(dtype), raw_shape(shape)


def _infer_below(net: Network, readers: list[ir.Node]) -> None:
    """Infer anew these layers, which read what was meant to change, and whatever is made from them.

    Each is looked at once, behind all that it is made from.
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
            set_type(net, value, dtype, shape)
            for use in value.uses():
                wait(use.node)


def _inferred(node: ir.Node) -> Made:
    """What a layer makes of what it reads now."""
    if not has_rule(node.domain, node.op_type):
        raise NetworkError(f"no shape rule for {node.op_type}, which reads a tensor whose shape changed")
    inputs = [None if value is None else Tensor.of(value) for value in node.inputs]
    attributes = {name: from_attr(attr) for name, attr in node.attributes.items()}
    return infer(node.domain, node.op_type, inputs, attributes, len(node.outputs))
