"""Products of one row on a GPU as sums over the rows of the weight, which the compiler fuses with what is near.

Such a product reads its weight once and does nothing else. A library's kernel for it takes no norm in front and
no sum, activation or gate behind; as a sum of products the compiler writes one kernel for all of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, constant, shape_of
from intarsia.engines.graph_rewrites.merged_products import groups_of, merge

aten = torch.ops.aten


def row_products(module: fx.GraphModule) -> int:
    """Write out the products of one row; how many there were.

    Products of one row with weights of unequal sizes (queries, keys and values of shared heads) are merged
    first. Those of equal sizes (a gate and what it gates) the compiler puts into one kernel by itself.
    """
    for nodes in groups_of(module):
        sizes = {shape_of(arguments(node)["weight"]) for node in nodes}
        if len(sizes) > 1 and all(_is_row(module, node) for node in nodes):
            merge(module, nodes)
    nodes = [node for node in module.graph.nodes if _is_row(module, node)]
    for node in nodes:
        _write_out(module.graph, node)
    return len(nodes)


def _is_row(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not aten.linear.default:
        return False
    given, shape = arguments(node), shape_of(node)
    weight = constant(module, given["weight"])
    if shape is None or weight is None or not weight.is_cuda or weight.ndim != 2:
        return False
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    return is_half and weight.is_contiguous() and math.prod(shape[:-1]) == 1


def _write_out(graph: fx.Graph, node: fx.Node) -> None:
    given: dict[str, Any] = arguments(node)
    described = node.meta["val"]
    with graph.inserting_before(node):
        row = graph.call_function(aten.reshape.default, (given["input"], [1, -1]))
        wide = [
            graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32})
            for x in (row, given["weight"])
        ]
        product = graph.call_function(aten.mul.Tensor, tuple(wide))
        total = graph.call_function(aten.sum.dim_IntList, (product, [1]))
        if given["bias"] is not None:  # before it is rounded, as `linear` adds it
            total = graph.call_function(aten.add.Tensor, (total, given["bias"]))
        short = graph.call_function(aten._to_copy.default, (total,), {"dtype": described.dtype})
        result = graph.call_function(aten.reshape.default, (short, list(described.shape)))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
