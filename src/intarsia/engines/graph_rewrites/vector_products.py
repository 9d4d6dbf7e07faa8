"""Products of one row in bfloat16 as products of a matrix with a vector.

On a CPU `linear` hands them to a kernel for matrices; the one for vectors sums in float32 just as well, and
may read weights faster. Which is faster is measured.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, constant, shape_of

aten = torch.ops.aten


def vector_products(module: fx.GraphModule) -> int:
    """Make vectors of the rows; how many products there were."""
    graph, nodes = module.graph, one_row_products(module)
    for node in nodes:
        rows, weight, *_ = node.args
        made = node.meta["val"].shape
        with graph.inserting_before(node):
            row = graph.call_function(aten.reshape.default, (rows, [-1]))
            product = graph.call_function(aten.mv.default, (weight, row))
            result = graph.call_function(aten.reshape.default, (product, list(made)))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return len(nodes)


def one_row_products(module: fx.GraphModule) -> list[fx.Node]:
    """The products of one row with a weight in bfloat16 on the CPU that add nothing.

    A bias is added by `linear` before it rounds, and would be after it here.
    """
    return [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is aten.linear.default and _has_one_row(module, node)
    ]


def _has_one_row(module: fx.GraphModule, node: fx.Node) -> bool:
    given, made = arguments(node), shape_of(node)
    weight = constant(module, given["weight"])
    if made is None or weight is None or given["bias"] is not None:
        return False
    is_plain = weight.ndim == 2 and weight.is_contiguous() and weight.device.type == "cpu"
    return is_plain and weight.dtype == torch.bfloat16 and math.prod(made[:-1]) == 1
