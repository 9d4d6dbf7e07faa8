"""The support table: which engine takes which node, and why not.

The user's options are refusals in it, and groups of nodes that are not cut apart agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from intarsia.capture.annotate import wanted_engine
from intarsia.errors import PartitionError
from intarsia.graph.nodes import bodies_of, compute_nodes, is_compute, is_control_flow, is_getitem, op_name
from intarsia.graph.segment import PYTORCH as PYTORCH
from intarsia.partition.names import module_matcher, op_matcher
from intarsia.partition.options import Atomic, PartitionOptions


@dataclass(frozen=True, eq=False)
class SupportTable:
    """Engines in priority order, and for every refused node the reason of each engine.

    The last engine is `"pytorch"`, which takes every node.

    Example:
        >>> table = SupportTable(("onnxruntime", "pytorch"), {})
        >>> table.engines
        ('onnxruntime', 'pytorch')
    """

    engines: tuple[str, ...]
    refusals: Mapping[fx.Node, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.engines or self.engines[-1] != PYTORCH:
            raise PartitionError(
                f"engines={self.engines!r} must end with {PYTORCH!r}, which takes every node"
            )
        if len(set(self.engines)) != len(self.engines):
            raise PartitionError(f"engines={self.engines!r} names an engine twice")
        object.__setattr__(self, "refusals", MappingProxyType(dict(self.refusals)))

    def accepts(self, node: fx.Node, engine: str) -> bool:
        """True when `engine` takes `node`."""
        return engine == PYTORCH or engine not in self.refusals.get(node, ())

    def choice(self, node: fx.Node) -> str:
        """The first engine, in priority order, that takes `node`."""
        refused = self.refusals.get(node)
        if not refused:
            return self.engines[0]
        return next(engine for engine in self.engines if engine == PYTORCH or engine not in refused)

    def reasons(self, node: fx.Node, engine: str) -> dict[str, str]:
        """Why the node is not on an engine before `engine`: the reason of each."""
        refused = self.refusals.get(node)
        if not refused:
            return {}
        before = self.engines[: self.engines.index(engine)]
        return {name: refused[name] for name in before if name in refused}

    def with_refusals(self, more: Mapping[fx.Node, Mapping[str, str]]) -> SupportTable:
        """A new table with further refusals. Existing reasons stay."""
        merged = dict(self.refusals)
        for node, reasons in more.items():
            merged[node] = {**reasons, **merged.get(node, {})}
        return replace(self, refusals=merged)

    def with_engines(self, engines: tuple[str, ...]) -> SupportTable:
        """A new table over other engines or another order. Existing reasons stay."""
        return replace(self, engines=engines)


def constrain(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> SupportTable:
    """A table in the order of `backend_priority` that also refuses what the user's options exclude.

    These are operators and modules that stay in PyTorch, operators that `backend_support_map` does not give
    to an engine, and engines other than the one that `run_on` names. A refusal inside a body refuses the
    whole control flow. Constraining a table twice changes nothing.
    """
    table = _prioritise(gm, table, options)
    refused: dict[fx.Node, dict[str, str]] = {}
    others = [engine for engine in table.engines if engine != PYTORCH]
    by_op = [(name, op_matcher(name)) for name in options.torch_executed_ops]
    by_module = [module_matcher(name) for name in options.torch_executed_modules]
    for node in compute_nodes(gm.graph):
        reasons: dict[str, str] = {}
        for _, matches in by_op:
            if matches(node):
                reasons = dict.fromkeys(others, f"torch_executed_ops names {op_name(node)}")
        for find in by_module:
            if path := find(node):
                reasons = dict.fromkeys(others, f"torch_executed_modules names {path}")
        wanted = wanted_engine(node)
        if wanted is not None:
            if wanted not in table.engines:
                raise PartitionError(
                    f"run_on({wanted!r}) around {node.name} names none of {list(table.engines)}"
                )
            reasons = {e: f"run_on({wanted!r}) asks for {wanted}" for e in others if e != wanted} | reasons
        for body in bodies_of(node) if is_control_flow(node) else ():
            reasons = _reasons_within(body, others, options) | reasons
        if reasons:
            refused[node] = reasons
    return table.with_refusals(refused) if refused else table


def _reasons_within(
    body: fx.GraphModule, engines: Sequence[str], options: PartitionOptions
) -> dict[str, str]:
    """Why engines may not run a body."""
    reasons = {e: "memory_budget holds in bodies" for e in engines if e in options.memory_budget}
    inner = constrain(body, SupportTable((*engines, PYTORCH)), replace(options, backend_priority=None))
    for refusals in inner.refusals.values():
        reasons = {engine: f"in its body, {reason}" for engine, reason in refusals.items()} | reasons
    return reasons


def _prioritise(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions) -> SupportTable:
    """A table in the order of `backend_priority`, restricted by `backend_support_map`."""
    engines = tuple(options.backend_priority or table.engines)
    unknown = [engine for engine in engines if engine not in table.engines]
    if unknown:
        raise PartitionError(
            f"backend_priority names {unknown[0]!r}, but the engines are {list(table.engines)}"
        )
    table = table.with_engines((*(engine for engine in engines if engine != PYTORCH), PYTORCH))
    if options.backend_support_map is None:
        return table
    matchers = {e: [op_matcher(name) for name in names] for e, names in options.backend_support_map.items()}
    refused: dict[fx.Node, dict[str, str]] = {}
    for node in compute_nodes(gm.graph):
        for engine in table.engines:
            if engine != PYTORCH and not any(matches(node) for matches in matchers.get(engine, ())):
                reason = f"backend_support_map does not give {op_name(node)} to {engine}"
                refused.setdefault(node, {})[engine] = reason
    return table.with_refusals(refused)


def find_groups(gm: fx.GraphModule, patterns: Sequence[Atomic]) -> list[list[fx.Node]]:
    """The groups of nodes that the patterns match, in graph order. Groups that share a node are joined."""
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
    """A note for each chain of `atomic` that occurs nowhere in the graph."""
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
                reasons.setdefault(engine, f"it stays with {op_name(node)} ({reason})")
        if reasons:
            refused.update((node, reasons) for node in group)
    return table.with_refusals(refused) if refused else table


def _chains(graph: fx.Graph, ops: Sequence[Callable[[fx.Node], bool]]) -> list[Sequence[fx.Node]]:
    """Matches in which each node has no reader but the next one, so that nothing can come between them."""
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
                raise PartitionError(
                    f"an atomic pattern holds {node.name}, which computes nothing ({node.op})"
                )
            leader.setdefault(node, node)
            leader[lead(node)] = lead(group[0])
    joined: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in leader:
            joined.setdefault(lead(node), []).append(node)
    return list(joined.values())
