"""Aliasing and mutation: which values share memory, and which values a node changes in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from intarsia.graph.nodes import has_no_effect, is_getitem
from intarsia.lower.purity import written_arguments

_MAY_ALIAS = torch.Tag.maybe_aliasing_or_mutating


def changed_values(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [] if node.op != "call_function" or has_no_effect(node) else node.all_input_nodes
    roots = written_arguments(node)
    if _MAY_ALIAS in target.tags:
        # In training, batch_norm updates the running statistics, which its schema does not say.
        roots += [v for v in node.all_input_nodes if _is_buffer(v)]
    return roots


def memory_of(node: fx.Node) -> frozenset[fx.Node]:
    """The nodes whose memory the value of `node` may use: itself, or what it is a view or alias of."""
    members: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        value = waiting.pop()
        base = _base(value)
        if base is None:
            members.add(value)
        else:
            waiting.append(base)
    return frozenset(members)


def written_values(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Those of `nodes` whose memory one of them changes."""
    nodes = list(nodes)
    written = {root for node in nodes for value in changed_values(node) for root in memory_of(value)}
    return frozenset(node for node in nodes if memory_of(node) & written)


def _base(node: fx.Node) -> fx.Node | None:
    target = node.target
    if is_getitem(node):
        first = node.args[0]
    elif isinstance(target, torch._ops.OpOverload) and (
        _MAY_ALIAS in target.tags or any(r.alias_info is not None for r in target._schema.returns)
    ):
        first = node.args[0] if node.args else None
    else:
        return None
    return first if isinstance(first, fx.Node) else None


def _is_buffer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and not value.requires_grad
