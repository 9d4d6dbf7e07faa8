"""Hierarchical segmentation: engines in priority order, each with the ops it is given."""

from __future__ import annotations

from torch import fx

from intarsia.graph.plan import Plan
from intarsia.partition.assemble import assemble
from intarsia.partition.constrain import prioritise
from intarsia.partition.options import PartitionOptions
from intarsia.partition.schedule import fewest
from intarsia.partition.table import SupportTable


def hierarchical(gm: fx.GraphModule, table: SupportTable, options: PartitionOptions | None = None) -> Plan:
    """Every node to the engine of highest priority that takes it.

    The priority is the table's, or `options.backend_priority`; `options.backend_support_map` narrows what
    each engine is given, by op name. A block too small for one engine is offered to the next.

    Example:
        >>> options = PartitionOptions(
        ...     backend_priority=("openvino", "onnxruntime"),
        ...     backend_support_map={"openvino": ("aten::convolution",), "onnxruntime": ("aten::relu",)},
        ... )
        >>> plan = hierarchical(gm, table, options)
    """
    options = options or PartitionOptions()
    return assemble(gm, prioritise(gm, table, options), options, fewest, "hierarchical")
