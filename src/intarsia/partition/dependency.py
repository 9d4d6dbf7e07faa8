"""Dependency-aware segmentation: the fewest segments the dependencies allow."""

from __future__ import annotations

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import fewest
from intarsia.partition.table import SupportTable


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
