"""Who runs what: strategies that turn a graph and a support table into a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.piece import Piece, extract
from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment
from intarsia.partition.options import PartitionOptions
from intarsia.partition.strategies import dependency, greedy, hierarchical
from intarsia.partition.table import PYTORCH, SupportTable

Strategy: TypeAlias = Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan]

STRATEGIES: dict[str, Strategy] = {
    "greedy": greedy,
    "dependency": dependency,
    "hierarchical": hierarchical,
}


def find_strategy(partition: str | Strategy) -> Strategy:
    """The strategy of that name, or the function itself."""
    if not isinstance(partition, str):
        if not callable(partition) or isinstance(partition, type):
            raise PartitionError(
                f"partition={partition!r} is not a strategy that makes a plan without measuring"
            )
        return partition
    if partition not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise PartitionError(f"there is no partition strategy {partition!r}; known are {known}")
    return STRATEGIES[partition]


__all__ = [
    "PYTORCH",
    "STRATEGIES",
    "PartitionOptions",
    "Piece",
    "Plan",
    "Segment",
    "Strategy",
    "SupportTable",
    "dependency",
    "extract",
    "find_strategy",
    "greedy",
    "hierarchical",
]
