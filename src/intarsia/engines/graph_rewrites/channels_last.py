"""Images and the weights of their convolutions laid out channel by channel innermost (`channels_last`).

Kernels keep the layout that they are given, so what enters the first convolution decides for all behind it.

Results get the model's strides back: a caller may call `view` on them. A graph that shows the layout
otherwise (random numbers in memory order, views returned) is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, attach, constant
from intarsia.graph.nodes import is_ordered

aten = torch.ops.aten
_KERNELS = (
    aten.conv2d.default,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
)
_BY_MEMORY = (aten.view_as_complex.default, aten.view.dtype)  # which ask for neighbours in memory


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
    """The convolutions to be laid out so; none where the graph shows how its values are laid out.

    It does where numbers are drawn in the order of memory, memory is read as another dtype, an image comes
    laid out otherwise, or a result is a view of another layout.
    """
    found = [node for node in module.graph.nodes if _is_of_images(module, node)]
    reached = _reached(module.graph, found)
    results = [node for node in module.graph.output_node().all_input_nodes if node in reached]
    images = [node.args[0] for node in found if _is_placeholder(node.args[0])]
    shows = any(is_ordered(node) or node.target in _BY_MEMORY for node in reached)
    return found if not shows and all(map(_is_contiguous, (*images, *results))) else []


def _is_of_images(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _KERNELS:
        return False
    given = arguments(node)
    weight, image = constant(module, given["weight"]), _value(node.args[0])
    return weight is not None and weight.dim() == 4 and image is not None and image.dim() == 4


def _lay_out_results(graph: fx.Graph, kernels: Sequence[fx.Node]) -> None:
    """Results are contiguous as they were: who calls `view` on one must not meet another layout."""
    reached, output = _reached(graph, kernels), graph.output_node()

    def laid_out(node: fx.Node) -> fx.Node:
        if node not in reached or _value(node) is None:
            return node
        found = graph.call_function(aten.contiguous.default, (node,))
        found.meta = dict(node.meta)
        return found

    with graph.inserting_before(output):
        output.args = fx.node.map_arg(output.args, laid_out)


def _reached(graph: fx.Graph, kernels: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on convolutions, these included."""
    reached = set(kernels)
    for node in graph.nodes:
        if node.op != "output" and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _is_placeholder(image: Any) -> bool:
    return isinstance(image, fx.Node) and image.op == "placeholder"


def _value(node: Any) -> torch.Tensor | None:
    made = node.meta.get("val") if isinstance(node, fx.Node) else None
    return made if isinstance(made, torch.Tensor) else None


def _is_contiguous(node: Any) -> bool:
    value = _value(node)
    return value is None or value.is_contiguous()
