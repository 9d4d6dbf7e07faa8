"""Strategies by name: each turns a graph and a support table into a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import fewest, in_order
from intarsia.partition.table import SupportTable

Strategy: TypeAlias = Callable[[fx.GraphModule, SupportTable, PartitionOptions], Plan]


def greedy(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """One segment for every run of neighbours, in graph order, that go to the same engine.

    Simple, predictable, and often far from the fewest segments; `dependency` reorders nodes to do better.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> tanh = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {tanh: {"mine": "no converter"}})
        >>> greedy(gm, table, PartitionOptions(min_block_size=1)).engines
        ('mine', 'pytorch')
    """
    return assemble(gm, table, options or PartitionOptions(), in_order, "greedy")


def dependency(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """Each node to its first engine, reordered as far as dependencies allow so that segments are few.

    For two engines the count is the least possible; for more it is never above what keeping one segment
    of every engine open in one pass gives.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> tanh = list(gm.graph.nodes)[2]
        >>> table = SupportTable(("mine", "pytorch"), {tanh: {"mine": "no converter"}})
        >>> dependency(gm, table, PartitionOptions(min_block_size=1)).engines
        ('mine', 'pytorch')
    """
    return assemble(gm, table, options or PartitionOptions(), fewest, "dependency")


def hierarchical(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """Every node to the engine of highest priority that takes it.

    The priority is the table's, or `options.backend_priority`; `options.backend_support_map` narrows what
    each engine is given, by op name. A block too small for one engine is offered to the next.

    Example:
        >>> import torch
        >>> gm = fx.symbolic_trace(lambda x: torch.tanh(torch.relu(x)))
        >>> options = PartitionOptions(
        ...     min_block_size=1,
        ...     backend_priority=("a", "b"),
        ...     backend_support_map={"a": (torch.relu,), "b": (torch.tanh,)},
        ... )
        >>> hierarchical(gm, SupportTable(("b", "a", "pytorch")), options).engines
        ('a', 'b')
    """
    return assemble(gm, table, options or PartitionOptions(), fewest, "hierarchical")


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
