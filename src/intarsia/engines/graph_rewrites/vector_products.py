"""Products of one row in bfloat16 as products of a matrix with a vector.

On a CPU `linear` hands them to a kernel for matrices; the one for vectors sums in float32 just as well, and
may read weights faster. Inductor writes such products as loops of its own. Which is faster is measured.

In bfloat16 Inductor's loop reads weights faster than PyTorch's kernels if weights are not frozen (freezing
keeps them in float32, twice the bytes) and what makes the vector is stored (`realize_reads_threshold=0`).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, constant, shape_of
from intarsia.engines.graph_rewrites.weight_products import weight_products

aten = torch.ops.aten


def vector_products(module: fx.GraphModule) -> int:
    """Make vectors of the rows; how many products there were."""
    graph, nodes = module.graph, one_row_products(module)
    for node in nodes:
        given, made = arguments(node), node.meta["val"].shape
        weight, bias = given["weight"], given["bias"]
        with graph.inserting_before(node):
            row = graph.call_function(aten.reshape.default, (given["input"], [-1]))
            if bias is None:
                product = graph.call_function(aten.mv.default, (weight, row))
            else:  # which `linear` adds before it rounds, too
                product = graph.call_function(aten.addmv.default, (bias, weight, row))
            result = graph.call_function(aten.reshape.default, (product, list(made)))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return len(nodes)


def one_row_products(module: fx.GraphModule) -> list[fx.Node]:
    """The products of one row with a weight in bfloat16 on the CPU."""
    return [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is aten.linear.default and _has_one_row(module, node)
    ]


def has_only_one_row_products(module: fx.GraphModule) -> bool:
    """Whether all products with large weights are such ones, and there are some: the program of a token."""
    products, vectors = weight_products(module), set(one_row_products(module))
    return bool(products) and all(node in vectors for node in products)


def _has_one_row(module: fx.GraphModule, node: fx.Node) -> bool:
    given, made = arguments(node), shape_of(node)
    weight = constant(module, given["weight"])
    bias = None if given["bias"] is None else given["bias"].meta["val"]
    if made is None or weight is None or (bias is not None and bias.dim() > 1):
        return False
    is_plain = weight.ndim == 2 and weight.is_contiguous() and weight.device.type == "cpu"
    return is_plain and weight.dtype == torch.bfloat16 and math.prod(made[:-1]) == 1
