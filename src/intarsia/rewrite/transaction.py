"""One try of one pattern at one layer: done and checked, or undone."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError, RewriteError
from intarsia.network import Layer, Network, Tensor
from intarsia.network.attributes import from_attr
from intarsia.network.infer import has_rule, infer
from intarsia.network.journal import Added, Edit, Marked, Moved, Removed, Typed, undo
from intarsia.network.network import raw_shape
from intarsia.network.raw import graph_of, producer_of, reads_of, shape_of, type_of
from intarsia.network.uses import is_dead
from intarsia.network.verify import merged, shape_clash, verify_layer
from intarsia.rewrite.pattern import PatternRewriter, Refusal


def attempt(
    net: Network, pattern: PatternRewriter, node: ir.Node, found: Any, *, keep: bool = True
) -> list[Edit] | Refusal:
    """Let a pattern act on a layer; what it did, or why it did not. The network is under guard.

    Whatever it did is undone if it says no, breaks the network (RewriteError), or `keep` is false.
    """
    edits: list[Edit] = []
    net.journal, outer = edits, net.anchor
    net.anchor = node
    done = False
    try:
        said = pattern.perform(Layer(node), found)
        if not said:
            return said if isinstance(said, Refusal) else Refusal("match_and_rewrite() said no")
        if not edits:
            raise RewriteError("it said that it rewrote the layer and changed nothing")
        _sweep(net, edits)
        _check(net, edits, pattern.keep_types)
        done = keep
        return edits
    except Exception as error:
        where = f"pattern {pattern.name!r} at layer {node.name} ({node.op_type})"
        raise RewriteError(f"{where} was taken back: {error}") from error
    finally:
        net.journal, net.anchor = None, outer
        if not done:
            undo(net, edits)


def _sweep(net: Network, edits: list[Edit]) -> None:
    """Take out what nothing reads of the new layers and of those whose readers were moved or removed."""
    dead: list[ir.Node] = []
    for edit in edits:
        if type(edit) is Added:
            if graph_of(edit.node) is not None and is_dead(edit.node):
                dead.append(edit.node)
        elif type(edit) is Removed:
            for value in edit.inputs:
                if value is not None and not reads_of(value) and (maker := producer_of(value)) is not None:
                    dead.append(maker)
        elif type(edit) is Moved and (maker := producer_of(edit.old)) is not None:
            dead.append(maker)
    if dead:
        net.remove_dead(dead)


def _check(net: Network, edits: list[Edit], keep_types: bool) -> None:
    """Arity, types, uses and outputs of what the edits touched; the network itself refuses cycles."""
    retyped: list[ir.Value] = []
    for edit in edits[:]:
        if type(edit) is Removed:
            if not is_dead(edit.node):
                raise NetworkError(f"layer {edit.node.name} was removed and is still read")
        elif type(edit) is Added:
            if not edit.inferred and graph_of(edit.node) is not None:
                verify_layer(edit.node)
        elif type(edit) is Moved:
            old, new = edit.old, edit.new
            was, now = type_of(old), type_of(new)
            if shape_of(old) is shape_of(new) is not None and was and now and was.dtype is now.dtype:
                continue
            if not _same_type(net, old, new, keep_types):
                retyped.append(new)
        elif type(edit) is Marked:
            raise NetworkError(f"it made {edit.value.name} an output of the network")
    if retyped:
        _infer_below(net, retyped)


def _same_type(net: Network, old: ir.Value, new: ir.Value, keep_types: bool) -> bool:
    """Whether readers see the type they saw; what was known of either shape is kept."""
    was, now = Tensor.of(old), Tensor.of(new)
    if was.dtype != now.dtype:
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, of another dtype")
        return False
    if clash := shape_clash(was.shape, now.shape) or _lost_symbol(was, now):
        if keep_types:
            raise NetworkError(f"{was!r} was replaced by {now!r}, of another shape: {clash}")
        return False
    both = merged(was.shape, now.shape)
    if both != now.shape:
        set_type(net, new, was.dtype, both)
    return True


def _lost_symbol(was: Tensor, now: Tensor) -> str | None:
    """Two different symbols, or a symbol and a size, are not known to be equal."""
    for a, b in zip(was.shape, now.shape, strict=True):
        if a != b and a is not None and b is not None:
            return f"{a} against {b}"
    return None


def set_type(net: Network, value: ir.Value, dtype: ir.DataType, shape: tuple[int | str | None, ...]) -> None:
    """Give a tensor another type or shape, so that it can be undone."""
    if net.journal is not None:
        net.journal.append(Typed(value, value.type, value.shape))
    value.type, value.shape = ir.TensorType(dtype), raw_shape(shape)


def _infer_below(net: Network, changed: list[ir.Value]) -> None:
    """Infer anew whatever is made from tensors whose type was meant to change."""
    waiting = [use.node for value in changed for use in value.uses()]
    while waiting:
        node = waiting.pop()
        if not has_rule(node.domain, node.op_type):
            raise NetworkError(f"no shape rule for {node.op_type}, which reads a tensor whose shape changed")
        inputs = [None if value is None else Tensor.of(value) for value in node.inputs]
        attributes = {name: from_attr(attr) for name, attr in node.attributes.items()}
        made = infer(node.domain, node.op_type, inputs, attributes, len(node.outputs))
        for value, (dtype, shape) in zip(node.outputs, made, strict=False):
            if value.dtype == dtype and Tensor.of(value).shape == shape:
                continue
            set_type(net, value, dtype, shape)
            waiting += [use.node for use in value.uses()]
