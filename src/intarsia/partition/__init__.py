"""Who runs what: strategies that turn a graph and a support table into a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import fx

from intarsia.graph.piece import Piece, extract
from intarsia.graph.plan import Plan, Segment
from intarsia.partition.dependency import dependency
from intarsia.partition.greedy import greedy
from intarsia.partition.hierarchical import hierarchical
from intarsia.partition.options import PartitionOptions
from intarsia.partition.table import PYTORCH, SupportTable

Strategy: TypeAlias = Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan]

STRATEGIES: dict[str, Strategy] = {
    "greedy": greedy,
    "dependency": dependency,
    "hierarchical": hierarchical,
}

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
    "greedy",
    "hierarchical",
]
