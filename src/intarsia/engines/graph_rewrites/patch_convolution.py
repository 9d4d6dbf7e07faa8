"""A convolution whose kernel equals its stride is a reshape and one product: patches do not overlap.

    (n, c, h, w) ──▶ patches (n, h/k * w/k, c * k * k) ──product──▶ (n, h/k, w/k, out) ──▶ (n, out, h/k, w/k)

The patch embedding of a vision transformer spends most of its time in a general convolution kernel otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def patch_convolutions_as_products(module: fx.GraphModule) -> int:
    """Replace every such convolution of constant weight; how many there were."""
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
    image, weight, _, stride, padding, dilation, groups = _arguments(node)
    shapes = [_shape(image), _shape(weight)]
    if shapes[0] is None or shapes[1] is None or len(shapes[0]) != 4 or groups != 1:
        return False
    kernel = shapes[1][2:]
    fits = all(size % length == 0 for size, length in zip(shapes[0][2:], kernel, strict=True))
    plain = all(p == 0 for p in padding) and all(d == 1 for d in dilation)
    # A kernel of one element is a product already, and every library knows it.
    return fits and plain and tuple(stride) == kernel and kernel != (1, 1)


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    image, weight, bias, *_ = _arguments(node)
    (n, c, h, w), (out, _, kh, kw) = _shape(image), _shape(weight)  # type: ignore[misc]
    call = graph.call_function
    split = call(aten.reshape.default, (image, [n, c, h // kh, kh, w // kw, kw]))
    moved = call(aten.permute.default, (split, [0, 2, 4, 1, 3, 5]))
    patches = call(aten.reshape.default, (moved, [n, (h // kh) * (w // kw), c * kh * kw]))
    flat = call(aten.reshape.default, (weight, [out, c * kh * kw]))
    made = call(aten.linear.default, (patches, flat, bias))
    pixels = call(aten.reshape.default, (made, [n, h // kh, w // kw, out]))
    return call(aten.permute.default, (pixels, [0, 3, 1, 2]))


def _arguments(node: fx.Node) -> list[Any]:
    """All seven arguments of `conv2d`, pairs written out."""
    defaults = [None, None, None, [1, 1], [0, 0], [1, 1], 1]
    names = ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]
    given: list[Any] = [*node.args, *defaults[len(node.args) :]]
    given = [node.kwargs.get(name, value) for name, value in zip(names, given, strict=True)]
    pair = [list(value) * 2 if len(value) == 1 else list(value) for value in given[3:6]]
    return [*given[:3], *pair, given[6]]


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)
