"""Strategies by name: from a graph and a support table to a plan."""

from __future__ import annotations

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import fewest, in_order
from intarsia.partition.table import SupportTable

# Greedy segmentation: walk the graph in order and cut wherever the engine changes.


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


# Dependency-aware segmentation: the fewest segments the dependencies allow.


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


# Hierarchical segmentation: engines in priority order, each with the ops it is given.


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
