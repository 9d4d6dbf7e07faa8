"""Images and the weights of their convolutions laid out channel by channel innermost (`channels_last`).

Kernels keep the layout that they are given, so what enters the first convolution decides for all behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, attach, constant

aten = torch.ops.aten
_KERNELS = (
    aten.conv2d.default,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
)


def channels_last(module: fx.GraphModule) -> int:
    """Lay out weights and the images that come from outside, results as before; how many weights."""
    kernels = image_convolutions(module)
    if not kernels:
        return 0
    _lay_out_results(module.graph, kernels)
    images: dict[fx.Node, fx.Node] = {}
    for node in kernels:
        weight = arguments(node)["weight"]
        value = constant(module, weight)
        assert value is not None
        with module.graph.inserting_before(node):
            laid = value.contiguous(memory_format=torch.channels_last)
            node.replace_input_with(weight, attach(module, f"_nhwc_{node.name}", laid))
            image = node.args[0]
            if not isinstance(image, fx.Node) or image.op != "placeholder":
                continue
            if image not in images:
                images[image] = module.graph.call_function(
                    aten.contiguous.default, (image,), {"memory_format": torch.channels_last}
                )
            node.replace_input_with(image, images[image])
    return len(kernels)


def image_convolutions(module: fx.GraphModule) -> list[fx.Node]:
    """The convolutions of images whose weights are constants."""
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _KERNELS]
    weights = [constant(module, arguments(node)["weight"]) for node in calls]
    pairs = zip(calls, weights, strict=True)
    return [node for node, weight in pairs if weight is not None and weight.dim() == 4]


def _lay_out_results(graph: fx.Graph, kernels: list[fx.Node]) -> None:
    """Results are contiguous where they were: who calls `view` on one must not meet another layout."""
    reached = set(kernels)
    for node in graph.nodes:
        if node.op != "output" and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    output = graph.output_node()

    def laid_out(node: fx.Node) -> Any:
        made = node.meta.get("val")
        if node not in reached or not isinstance(made, torch.Tensor) or not made.is_contiguous():
            return node
        found = graph.call_function(aten.contiguous.default, (node,))
        found.meta = dict(node.meta)
        return found

    with graph.inserting_before(output):
        output.args = fx.node.map_arg(output.args, laid_out)
