"""Products of one input with several constant weights, as one product that is split afterwards.

Queries, keys and values are the usual case. Merged before the graph is compiled, the parts reach attention as
views of one result; merged later, the compiler would copy them into the layout it had planned for.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten


def merge_products(module: fx.GraphModule) -> int:
    """Merge every group of `linear` nodes over one input; how many groups there were."""
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is aten.linear.default:
            weight, bias = _constant(module, node, 1), _constant(module, node, 2)
            if weight is not None and weight.dim() == 2 and (len(node.args) < 3 or bias is not None):
                key = (node.args[0], bias is None, weight.dtype, weight.device)
                groups.setdefault(key, []).append(node)
    merged = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in merged:
        _merge(module, nodes)
    return len(merged)


def _merge(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    weights = [_constant(module, node, 1) for node in nodes]
    biases = [_constant(module, node, 2) for node in nodes]
    sizes = [weight.shape[0] for weight in weights if weight is not None]
    weight = torch.cat([weight for weight in weights if weight is not None])
    bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    graph, first = module.graph, nodes[0]
    with graph.inserting_before(first):
        operands = [_attach(module, f"_merged_{first.name}_{i}", x) for i, x in enumerate((weight, bias))]
        made = graph.call_function(aten.linear.default, (first.args[0], *operands))
        parts = graph.call_function(aten.split_with_sizes.default, (made, sizes, -1))
        picked = [graph.call_function(operator.getitem, (parts, place)) for place in range(len(nodes))]
    for node, part in zip(nodes, picked, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _attach(module: fx.GraphModule, name: str, value: torch.Tensor | None) -> fx.Node | None:
    if value is None:
        return None
    module.register_buffer(name, value)
    return module.graph.get_attr(name)


def _constant(module: fx.GraphModule, node: fx.Node, place: int) -> torch.Tensor | None:
    source = node.args[place] if len(node.args) > place else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    value = getattr(module, str(source.target), None)
    return value if isinstance(value, torch.Tensor) else None
