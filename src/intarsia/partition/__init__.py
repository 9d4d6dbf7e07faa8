"""Who runs what: strategies that turn a graph and a support table into a plan."""

from intarsia.graph.piece import Piece, extract
from intarsia.graph.plan import Plan
from intarsia.graph.segment import Segment
from intarsia.partition.options import PartitionOptions
from intarsia.partition.strategies import (
    STRATEGIES,
    Strategy,
    dependency,
    find_strategy,
    greedy,
    hierarchical,
)
from intarsia.partition.table import PYTORCH, SupportTable

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
