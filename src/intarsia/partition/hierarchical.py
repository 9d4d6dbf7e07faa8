"""Hierarchical segmentation: engines in priority order, each with the ops it is given."""

from __future__ import annotations

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import fewest
from intarsia.partition.table import SupportTable


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
