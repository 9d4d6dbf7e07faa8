"""Atomic patterns: nodes that are never cut apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.nodes import is_compute, is_getitem, op_name
from intarsia.partition.names import op_matcher
from intarsia.partition.options import Atomic, PartitionOptions
from intarsia.partition.table import SupportTable


def find_groups(gm: fx.GraphModule, patterns: Sequence[Atomic]) -> list[list[fx.Node]]:
    """The groups of nodes the patterns match, in graph order; groups that share a node are one group."""
    chains: list[Sequence[fx.Node]] = []
    for pattern in patterns:
        if callable(pattern):
            chains.extend(pattern(gm))
        elif isinstance(pattern, str) or len(pattern) < 2:
            raise PartitionError(
                f"atomic pattern {pattern!r} must be a chain of two or more ops, or a function"
            )
        else:
            chains.extend(_chains(gm.graph, [op_matcher(name) for name in pattern]))
    return _joined(gm.graph, chains)


def unmatched_chains(gm: fx.GraphModule, options: PartitionOptions) -> list[str]:
    """A note for each chain of `atomic` that is nowhere in the graph."""
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    return [
        f"atomic={pattern!r} matches nothing: the operators are nowhere in a row, each read by the next alone"
        for pattern in options.atomic
        if not any(find_groups(body, [pattern]) for body in bodies)
    ]


def agree(table: SupportTable, groups: Sequence[Sequence[fx.Node]]) -> SupportTable:
    """A table where an engine that refuses one node of a group refuses them all."""
    refused: dict[fx.Node, dict[str, str]] = {}
    for group in groups:
        reasons: dict[str, str] = {}
        for node in group:
            for engine, reason in table.refusals.get(node, {}).items():
                reasons.setdefault(engine, f"kept with {op_name(node)} ({reason})")
        if reasons:
            refused.update((node, reasons) for node in group)
    return table.with_refusals(refused) if refused else table


def _chains(graph: fx.Graph, ops: Sequence[Callable[[fx.Node], bool]]) -> list[Sequence[fx.Node]]:
    """Chains where each node is read by the next alone: nothing can come between."""
    taken: set[fx.Node] = set()
    chains: list[Sequence[fx.Node]] = []
    for start in graph.nodes:
        chain: list[fx.Node] = []
        node: fx.Node | None = start
        for matches in ops:
            if node is None or node in taken or not is_compute(node) or not matches(node):
                break
            chain.append(node)
            node = _only_reader(node)
        if len(chain) == len(ops):
            chains.append(chain)
            taken.update(chain)
    return chains


def _only_reader(node: fx.Node) -> fx.Node | None:
    readers: dict[fx.Node, None] = {}
    for user in node.users:
        readers.update(user.users if is_getitem(user) else {user: None})
    return next(iter(readers)) if len(readers) == 1 else None


def _joined(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    leader: dict[fx.Node, fx.Node] = {}

    def lead(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for group in groups:
        for node in group:
            if not is_compute(node):
                raise PartitionError(f"an atomic pattern holds {node.name}, which does no work ({node.op})")
            leader.setdefault(node, node)
            leader[lead(node)] = lead(group[0])
    joined: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in leader:
            joined.setdefault(lead(node), []).append(node)
    return list(joined.values())
