"""Convolution, residual addition and relu as one kernel of cuDNN's, in channels_last."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.channels_last import channels_last
from intarsia.engines.graph_rewrites.constants import (
    arguments,
    attach,
    constant,
    only_user,
    pair,
    shape_of,
)

aten = torch.ops.aten
_RELU = (aten.relu.default, aten.relu_.default)


def fuse_convolutions(module: fx.GraphModule) -> int:
    """Fuse `relu(conv)` and `relu(conv + other)`, then lay images and weights out in channels_last."""
    found = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.conv2d.default and _fits(module, node):
            found += _fuse(module, node)
    if found:
        channels_last(module)
    return found


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    given = arguments(node)
    weight = constant(module, given["weight"])
    image = shape_of(given["input"])
    known = given["bias"] is None or constant(module, given["bias"]) is not None
    return weight is not None and weight.dim() == 4 and image is not None and len(image) == 4 and known


def _fuse(module: fx.GraphModule, node: fx.Node) -> bool:
    user = only_user(node)
    if user is None:
        return False
    given = arguments(node)
    weight = constant(module, given["weight"])
    assert weight is not None
    geometry = [pair(given[name]) for name in ("stride", "padding", "dilation")]
    other: Any = None
    last = user
    if user.target is aten.add.Tensor and arguments(user)["alpha"] == 1:
        other = next((value for value in user.args[:2] if value is not node), None)
        after = only_user(user)
        if after is None or shape_of(other) != shape_of(user) or shape_of(other) != shape_of(node):
            return False
        last = after
    if last.target not in _RELU:
        return False
    graph = module.graph
    with graph.inserting_before(last):  # the other summand may be made later than this convolution
        bias = given["bias"]
        if bias is None:  # the kernel would fill one with zeros at every call
            zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
            bias = attach(module, f"_zeros_{node.name}", zeros)
        if other is None:
            args = (given["input"], given["weight"], bias, *geometry, given["groups"])
            made = graph.call_function(aten.cudnn_convolution_relu.default, args)
        else:
            more = (given["input"], given["weight"], other, 1.0, bias, *geometry, given["groups"])
            made = graph.call_function(aten.cudnn_convolution_add_relu.default, more)
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    for gone in dict.fromkeys((last, user, node)):
        graph.erase_node(gone)
    return True
