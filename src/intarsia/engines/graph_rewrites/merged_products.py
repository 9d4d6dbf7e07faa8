"""Products of one input with several constant weights, as one product that is split afterwards.

Queries, keys and values are the usual case. Merged before the graph is compiled, the parts reach attention as
views of one result; merged later, the compiler would copy them into the layout it had planned for.

Projections merged before Inductor traces reach attention as views; its own freezing copies the parts into the
layout it had planned.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, attach, constant

aten = torch.ops.aten


def merge_products(module: fx.GraphModule) -> int:
    """Merge every group of `linear` nodes over one input; how many groups there were."""
    groups = groups_of(module)
    for nodes in groups:
        merge(module, nodes)
    return len(groups)


def groups_of(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The `linear` nodes over one input with constant weights, where there are several."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not aten.linear.default:
            continue
        given = arguments(node)
        weight, bias = constant(module, given["weight"]), constant(module, given["bias"])
        if weight is None or weight.dim() != 2 or (bias is None) != (given["bias"] is None):
            continue
        groups.setdefault((given["input"], bias is None, weight.dtype, weight.device), []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def merge(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Put one product in the place of several."""
    weights = [getattr(module, arguments(node)["weight"].target) for node in nodes]
    graph, first = module.graph, nodes[0]
    operands = {"weight": weights}
    if arguments(first)["bias"] is not None:
        operands["bias"] = [getattr(module, arguments(node)["bias"].target) for node in nodes]
    with graph.inserting_before(first):
        read = [attach(module, f"_merged_{first.name}_{name}", torch.cat(x)) for name, x in operands.items()]
        made = graph.call_function(aten.linear.default, (arguments(first)["input"], *read))
        described = first.meta["val"]
        made.meta["val"] = described.new_empty((*described.shape[:-1], sum(len(w) for w in weights)))
        sizes = [weight.shape[0] for weight in weights]
        parts = graph.call_function(aten.split_with_sizes.default, (made, sizes, -1))
        picked = [graph.call_function(operator.getitem, (parts, place)) for place in range(len(nodes))]
    for node, part in zip(nodes, picked, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
