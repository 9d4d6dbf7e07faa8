"""Whose memory a captured node's result lies in, and what a node changes: by the operators' declarations."""

from __future__ import annotations

import operator

import torch
from torch import fx

# They copy where they must, and then read what was there before a later change in place.
_MAY_COPY = ("reshape", "flatten", "contiguous", "to", "unflatten")


def alias_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a node's result lies in, by the operator's own declaration."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        many = node.args[0]
        return many if isinstance(many, fx.Node) and alias_of(many) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    shared = schema.returns[0].alias_info.before_set or {"*"}  # a list says nothing of its elements
    for place, argument in enumerate(schema.arguments):
        told = argument.alias_info
        if told is not None and (told.before_set | told.after_set) & shared:
            held = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return held if isinstance(held, fx.Node) else None
    return None


def may_copy(node: fx.Node) -> bool:
    """Whether a view by declaration is a copy where a view cannot be had."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.name.split("::")[-1] in _MAY_COPY


def changes(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    if node.op != "call_function" or not changes(node):
        return []
    pairs = [
        (argument, node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
        for place, argument in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    ]
    written = [held for a, held in pairs if a.alias_info is not None and a.alias_info.is_write]
    tensors = [x for held in written for x in (held if isinstance(held, list | tuple) else [held])]
    return [x for x in tensors if isinstance(x, fx.Node)]
