"""Whether somebody will ask a graph for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

NOTE = (
    "it needs gradients, which compiled modules do not give; call it under torch.no_grad(), or, if it is not"
    " trained, set requires_grad_(False) on it"
)


def needs_gradients(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a result of the graph, or something it changes, carries gradients back to an input.

    A graph of frozen weights and plain inputs does not, whatever the grad mode is around it.
    """
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return False
    switched_on = any(
        node.target is torch._C._set_grad_enabled and node.args == (True,) for node in module.graph.nodes
    )
    if not torch.is_grad_enabled() and not switched_on:
        return False
    output = next(iter(reversed(module.graph.nodes)))
    kept = [*output.all_input_nodes, *(node for node in module.graph.nodes if _writes(node))]
    values = [node.meta.get("example_value") for node in kept]
    return any(value is None or getattr(value, "requires_grad", False) for value in values)


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "iadd", "imul", "isub")
    return node.op in ("call_method", "call_function") and (in_place or "out" in node.kwargs)
