"""Where a graph spends its time: products with large weights."""

from __future__ import annotations

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import constant

aten = torch.ops.aten
_PRODUCTS = (
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
)  # fmt: skip
_LARGE = 2**14  # elements of a weight; frequencies of positions are fewer


def weight_products(module: fx.GraphModule) -> list[fx.Node]:
    """Products and convolutions with a large constant."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node for node in calls if node.target in _PRODUCTS and _large_weights(module, node)]


def has_only_bfloat16_products(module: fx.GraphModule) -> bool:
    """Whether all of them are in bfloat16, and there are some."""
    found = [weight for node in weight_products(module) for weight in _large_weights(module, node)]
    return bool(found) and all(weight.dtype == torch.bfloat16 for weight in found)


def _large_weights(module: fx.GraphModule, node: fx.Node) -> list[torch.Tensor]:
    values = [constant(module, source) for source in node.all_input_nodes]
    return [value for value in values if value is not None and value.numel() >= _LARGE]
