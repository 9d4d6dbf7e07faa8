"""Advice: which single op, if an engine took it, would leave the fewest segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from intarsia.graph.nodes import op_name
from intarsia.graph.plan import Plan
from intarsia.partition.options import PartitionOptions
from intarsia.partition.table import PYTORCH, SupportTable


@dataclass(frozen=True)
class Advice:
    """What would happen if `engine` took `op`: how many nodes that is, and the segments before and after."""

    op: str
    engine: str
    nodes: int
    before: int
    after: int

    def __str__(self) -> str:
        times = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        return f"if {self.engine} took {self.op} ({times}), {self.before} segments would become {self.after}"


def advise(
    gm: fx.GraphModule,
    table: SupportTable,
    strategy: Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan],
    options: PartitionOptions | None = None,
) -> list[Advice]:
    """Every op and engine whose refusals, if lifted, would save segments; the best first.

    Ops kept in PyTorch by the user's own choice are not held against an engine. With
    `require_full_compilation` there is nothing left to PyTorch, hence no advice.

    Example:
        >>> from intarsia.partition import dependency
        >>> import torch
        >>> gm = fx.symbolic_trace(lambda x: torch.relu(torch.lgamma(torch.relu(x))))
        >>> lgamma = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {lgamma: {"mine": "no converter"}})
        >>> print(advise(gm, table, dependency, PartitionOptions(min_block_size=1))[0])
        if mine took lgamma (1 node), 3 segments would become 1
    """
    options = options or PartitionOptions()
    if options.require_full_compilation:
        return []
    plan = strategy(gm, table, options)
    left = {node for segment in plan.segments if segment.engine == PYTORCH for node in segment.nodes}
    refused: dict[tuple[str, str], list[fx.Node]] = {}
    for node, reasons in table.refusals.items():
        for engine in reasons if node in left else ():
            refused.setdefault((op_name(node), engine), []).append(node)
    suggestions: list[Advice] = []
    for (op, engine), nodes in refused.items():
        after = len(strategy(gm, _lifted(table, nodes, engine), options))
        if after < len(plan):
            suggestions.append(Advice(op, engine, len(nodes), len(plan), after))
    return sorted(
        suggestions, key=lambda advice: (advice.after, table.engines.index(advice.engine), advice.op)
    )


def _lifted(table: SupportTable, nodes: list[fx.Node], engine: str) -> SupportTable:
    refusals = dict(table.refusals)
    for node in nodes:
        refusals[node] = {name: reason for name, reason in refusals[node].items() if name != engine}
    return SupportTable(table.engines, refusals)
