"""Convolutions of ATen graphs: folded norms, kernels of cuDNN's, layouts, and patches as products."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import attach, constant, only_user, pair, shape_of
from intarsia.graph.nodes import is_ordered
from intarsia.lower.purity import arguments

aten = torch.ops.aten


# Batch norm of fixed statistics, folded into the weights of the convolution before it.


def fold_batch_norms(module: fx.GraphModule) -> int:
    """Fold every batch norm whose input is a convolution that nobody else reads; how many there were."""
    count = 0
    for node in list(module.graph.nodes):
        convolution = node.args[0] if _is_norm(node) else None
        if not isinstance(convolution, fx.Node) or convolution.target is not aten.conv2d.default:
            continue
        if len(convolution.users) > 1:
            continue
        count += _fold(module, convolution, node)
    return count


def _is_norm(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is aten.batch_norm.default:
        return arguments(node)["training"] is False
    if node.target is not aten._native_batch_norm_legit_no_training.default:
        return False
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _fold(module: fx.GraphModule, convolution: fx.Node, norm: fx.Node) -> bool:
    source, held = arguments(convolution), arguments(norm)
    weight, bias = constant(module, source["weight"]), constant(module, source["bias"])
    mean, variance = (constant(module, held[name]) for name in ("running_mean", "running_var"))
    scale, shift = (constant(module, held[name]) for name in ("weight", "bias"))
    unknown = [
        name
        for values, known in ((source, {"bias": bias}), (held, {"weight": scale, "bias": shift}))
        for name, value in known.items()
        if values[name] is not None and value is None
    ]
    if weight is None or mean is None or variance is None or unknown:
        return False
    # In float32, so that half precision rounds once.
    factor = torch.rsqrt(variance.float() + held["eps"])
    factor = factor if scale is None else factor * scale.float()
    moved = -mean.float() * factor if bias is None else (bias.float() - mean.float()) * factor
    moved = moved if shift is None else moved + shift.float()
    folded = (weight.float() * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
    moved = moved.to(weight.dtype)
    if not (folded.isfinite().all() and moved.isfinite().all()):  # as they are not when multiplied one by one
        return False
    with module.graph.inserting_before(convolution):
        operands = [
            attach(module, f"_folded_{convolution.name}_weight", folded),
            attach(module, f"_folded_{convolution.name}_bias", moved),
        ]
    convolution.args = (source["input"], *operands, *[source[name] for name in _REST])
    convolution.kwargs = {}
    results = [norm] if norm.target is aten.batch_norm.default else list(norm.users)
    for result in results:
        convolution.meta = dict(result.meta)
        result.replace_all_uses_with(convolution)
        module.graph.erase_node(result)
    if norm not in results:
        module.graph.erase_node(norm)
    return True


_REST = ("stride", "padding", "dilation", "groups")


# Images and the weights of their convolutions laid out channel by channel innermost (`channels_last`).
#
# Kernels keep the layout that they are given, so what enters the first convolution decides for all after it.
#
# Results get the model's strides back: a caller may call `view` on them. A graph that shows the layout
# otherwise (random numbers in memory order, views returned) is left alone.


_KERNELS = (
    aten.conv2d.default,
    aten.cudnn_convolution_relu.default,
    aten.cudnn_convolution_add_relu.default,
)
_BY_MEMORY = (aten.view_as_complex.default, aten.view.dtype)  # which ask for neighbours in memory


def channels_last(module: fx.GraphModule) -> int:
    """Change the layout of weights and input images, not of results; returns the number of weights."""
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
    """The convolutions whose layout changes; none if the graph depends on the layout of its values.

    It does where numbers are drawn in the order of memory, memory is read as another dtype, an image comes
    laid out otherwise, or a result is a view of another layout.
    """
    matches = [node for node in module.graph.nodes if _is_of_images(module, node)]
    reached = _reached(module.graph, matches)
    results = [node for node in module.graph.output_node().all_input_nodes if node in reached]
    images = [node.args[0] for node in matches if _is_placeholder(node.args[0])]
    shows = any(is_ordered(node) or node.target in _BY_MEMORY for node in reached)
    return matches if not shows and all(map(_is_contiguous, (*images, *results))) else []


def _is_of_images(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _KERNELS:
        return False
    operands = arguments(node)
    weight, image = constant(module, operands["weight"]), _value(node.args[0])
    return weight is not None and weight.dim() == 4 and image is not None and image.dim() == 4


def _lay_out_results(graph: fx.Graph, kernels: Sequence[fx.Node]) -> None:
    """Results are contiguous as they were: a caller's `view` must not fail because of another layout."""
    reached, output = _reached(graph, kernels), graph.output_node()

    def laid_out(node: fx.Node) -> fx.Node:
        if node not in reached or _value(node) is None:
            return node
        match = graph.call_function(aten.contiguous.default, (node,))
        match.meta = dict(node.meta)
        return match

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
    described = node.meta.get("val") if isinstance(node, fx.Node) else None
    return described if isinstance(described, torch.Tensor) else None


def _is_contiguous(node: Any) -> bool:
    value = _value(node)
    return value is None or value.is_contiguous()


# A convolution whose kernel equals its stride is a reshape and one product: patches do not overlap.
#
#   (n, c, h, w) ──▶ patches (n, h/k * w/k, c * k * k) ──product──▶ (n, h/k, w/k, out) ──▶ (n, out, h/k, w/k)
#
# The patch embedding of a vision transformer spends most of its time in a general convolution kernel
# otherwise.


def patch_convolutions_as_products(module: fx.GraphModule) -> int:
    """Replace every such convolution; how many there were."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not aten.conv2d.default or not _is_patchwise(node):
            continue
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_product(module.graph, node))
        module.graph.erase_node(node)
        count += 1
    return count


def _is_patchwise(node: fx.Node) -> bool:
    operands = arguments(node)
    image, weight = shape_of(operands["input"]), shape_of(operands["weight"])
    if image is None or weight is None or len(image) != 4 or operands["groups"] != 1:
        return False
    kernel = weight[2:]
    fits = all(size % length == 0 for size, length in zip(image[2:], kernel, strict=True))
    plain = not any(operands["padding"]) and pair(operands["dilation"]) == [1, 1]
    # A kernel of one element is a product already, and every library knows it.
    return fits and plain and tuple(pair(operands["stride"])) == kernel and kernel != (1, 1)


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    operands = arguments(node)
    (n, c, h, w), (out, _, kh, kw) = shape_of(operands["input"]), shape_of(operands["weight"])  # type: ignore[misc]
    call = graph.call_function
    split = call(aten.reshape.default, (operands["input"], [n, c, h // kh, kh, w // kw, kw]))
    moved = call(aten.permute.default, (split, [0, 2, 4, 1, 3, 5]))
    patches = call(aten.reshape.default, (moved, [n, (h // kh) * (w // kw), c * kh * kw]))
    flat = call(aten.reshape.default, (operands["weight"], [out, c * kh * kw]))
    output = call(aten.linear.default, (patches, flat, operands["bias"]))
    pixels = call(aten.reshape.default, (output, [n, h // kh, w // kw, out]))
    result = call(aten.permute.default, (pixels, [0, 3, 1, 2]))
    result.meta = dict(node.meta)
    return result


# Convolution, residual addition and relu as one kernel of cuDNN's, in channels_last.


_RELU = (aten.relu.default, aten.relu_.default)


def fuse_convolutions(module: fx.GraphModule) -> int:
    """Fuse `relu(conv)` and `relu(conv + other)`, then lay images and weights out in channels_last."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is aten.conv2d.default and _fits(module, node):
            count += _fuse(module, node)
    if count:
        channels_last(module)
    return count


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    operands = arguments(node)
    weight = constant(module, operands["weight"])
    image = shape_of(operands["input"])
    known = operands["bias"] is None or constant(module, operands["bias"]) is not None
    return weight is not None and weight.dim() == 4 and image is not None and len(image) == 4 and known


def _fuse(module: fx.GraphModule, node: fx.Node) -> bool:
    user = only_user(node)
    if user is None:
        return False
    operands = arguments(node)
    weight = constant(module, operands["weight"])
    assert weight is not None
    geometry = [pair(operands[name]) for name in ("stride", "padding", "dilation")]
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
        bias = operands["bias"]
        if bias is None:  # the kernel would fill one with zeros at every call
            zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
            bias = attach(module, f"_zeros_{node.name}", zeros)
        if other is None:
            args = (operands["input"], operands["weight"], bias, *geometry, operands["groups"])
            result = graph.call_function(aten.cudnn_convolution_relu.default, args)
        else:
            more = (operands["input"], operands["weight"], other, 1.0, bias, *geometry, operands["groups"])
            result = graph.call_function(aten.cudnn_convolution_add_relu.default, more)
    result.meta = dict(last.meta)
    last.replace_all_uses_with(result)
    for gone in dict.fromkeys((last, user, node)):
        graph.erase_node(gone)
    return True
