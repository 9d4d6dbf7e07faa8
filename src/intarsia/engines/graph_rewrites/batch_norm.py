"""Batch norm of fixed statistics, folded into the weights of the convolution before it."""

from __future__ import annotations

import operator

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import arguments, attach, constant

aten = torch.ops.aten


def fold_batch_norms(module: fx.GraphModule) -> int:
    """Fold every batch norm whose input is a convolution that nobody else reads; how many there were."""
    found = 0
    for node in list(module.graph.nodes):
        convolution = node.args[0] if _is_norm(node) else None
        if not isinstance(convolution, fx.Node) or convolution.target is not aten.conv2d.default:
            continue
        if len(convolution.users) > 1:
            continue
        found += _fold(module, convolution, node)
    return found


def _is_norm(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is aten.batch_norm.default:
        return arguments(node)["training"] is False
    if node.target is not aten._native_batch_norm_legit_no_training.default:
        return False
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _fold(module: fx.GraphModule, convolution: fx.Node, norm: fx.Node) -> bool:
    given, held = arguments(convolution), arguments(norm)
    weight, bias = constant(module, given["weight"]), constant(module, given["bias"])
    mean, variance = (constant(module, held[name]) for name in ("running_mean", "running_var"))
    scale, shift = (constant(module, held[name]) for name in ("weight", "bias"))
    unknown = [
        name
        for values, known in ((given, {"bias": bias}), (held, {"weight": scale, "bias": shift}))
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
    convolution.args = (given["input"], *operands, *[given[name] for name in _REST])
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
