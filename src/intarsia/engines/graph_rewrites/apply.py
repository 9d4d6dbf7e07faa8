"""The rewrites by name, and how they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx, nn

from intarsia.engines.graph_rewrites.attention import flash_attention
from intarsia.engines.graph_rewrites.convolutions import (
    channels_last,
    fold_batch_norms,
    fuse_convolutions,
    patch_convolutions_as_products,
)
from intarsia.engines.graph_rewrites.fused_products import activation_epilogues, row_products
from intarsia.engines.graph_rewrites.products import merge_products, split_products, vector_products

Rewrite = Callable[[fx.GraphModule], int]

REWRITES: dict[str, Rewrite] = {
    "batch_norms": fold_batch_norms,
    "fused_convolutions": fuse_convolutions,
    "patch_convolutions": patch_convolutions_as_products,
    "row_products": row_products,
    "merged_products": merge_products,
    "activation_epilogues": activation_epilogues,
    "flash_attention": flash_attention,
    "split_products": split_products,
    "vector_products": vector_products,
    "channels_last": channels_last,
}


def apply_rewrites(module: fx.GraphModule, names: Iterable[str]) -> dict[str, int]:
    """Run rewrites by name, in that order; how often each one was applied."""
    counts = {name: REWRITES[name](module) for name in names}
    if any(counts.values()):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
        for name in [name for name in module._buffers if name not in used]:
            delattr(module, name)
        module.recompile()
    return counts


def own_copy(module: fx.GraphModule) -> fx.GraphModule:
    """The graph for an engine to change, its weights as buffers; they are shared, not copied."""
    root = nn.Module()
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op != "get_attr" or hasattr(root, name):
            continue
        value = getattr(module, name)
        if isinstance(value, torch.Tensor):
            root.register_buffer(name, value)
        else:  # the body of a loop or a choice
            setattr(root, name, value)
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    return fx.GraphModule(root, graph)
