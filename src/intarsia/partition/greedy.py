"""Greedy segmentation: walk the graph in order and cut wherever the engine changes."""

from __future__ import annotations

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import in_order
from intarsia.partition.table import SupportTable


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
