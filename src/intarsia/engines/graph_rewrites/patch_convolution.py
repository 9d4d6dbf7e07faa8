"""A convolution whose kernel equals its stride is a reshape and one product: patches do not overlap.

    (n, c, h, w) ──▶ patches (n, h/k * w/k, c * k * k) ──product──▶ (n, h/k, w/k, out) ──▶ (n, out, h/k, w/k)

The patch embedding of a vision transformer spends most of its time in a general convolution kernel otherwise.
"""

from __future__ import annotations

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, pair, shape_of

aten = torch.ops.aten


def patch_convolutions_as_products(module: fx.GraphModule) -> int:
    """Replace every such convolution; how many there were."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.conv2d.default or not _is_patchwise(node):
            continue
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_product(module.graph, node))
        module.graph.erase_node(node)
        found += 1
    return found


def _is_patchwise(node: fx.Node) -> bool:
    given = arguments(node)
    image, weight = shape_of(given["input"]), shape_of(given["weight"])
    if image is None or weight is None or len(image) != 4 or given["groups"] != 1:
        return False
    kernel = weight[2:]
    fits = all(size % length == 0 for size, length in zip(image[2:], kernel, strict=True))
    plain = not any(given["padding"]) and pair(given["dilation"]) == [1, 1]
    # A kernel of one element is a product already, and every library knows it.
    return fits and plain and tuple(pair(given["stride"])) == kernel and kernel != (1, 1)


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    given = arguments(node)
    (n, c, h, w), (out, _, kh, kw) = shape_of(given["input"]), shape_of(given["weight"])  # type: ignore[misc]
    call = graph.call_function
    split = call(aten.reshape.default, (given["input"], [n, c, h // kh, kh, w // kw, kw]))
    moved = call(aten.permute.default, (split, [0, 2, 4, 1, 3, 5]))
    patches = call(aten.reshape.default, (moved, [n, (h // kh) * (w // kw), c * kh * kw]))
    flat = call(aten.reshape.default, (given["weight"], [out, c * kh * kw]))
    made = call(aten.linear.default, (patches, flat, given["bias"]))
    pixels = call(aten.reshape.default, (made, [n, h // kh, w // kw, out]))
    result = call(aten.permute.default, (pixels, [0, 3, 1, 2]))
    result.meta = dict(node.meta)
    return result
