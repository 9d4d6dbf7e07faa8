"""Parts of a model under `torch.enable_grad()` or `no_grad()`, as plain nodes: nothing has gradients here."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def inline_grad_modes(module: fx.GraphModule) -> None:
    """Put the body of every `wrap_with_set_grad_enabled` in its place."""
    wrap = getattr(torch.ops.higher_order, "wrap_with_set_grad_enabled", None)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and wrap is not None and node.target is wrap:
            _inline(module.graph, node, getattr(module, str(node.args[1].target)))
    module.recompile()


def _inline(graph: fx.Graph, node: fx.Node, body: fx.GraphModule) -> None:
    inline_grad_modes(body)
    operands = iter(node.args[2:])
    copied: dict[fx.Node, Any] = {}
    returned: Any = ()
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copied[inner] = next(operands)
            elif inner.op == "output":
                returned = fx.map_arg(inner.args[0], copied.__getitem__)
            else:
                if inner.op == "get_attr" and not hasattr(graph.owning_module, str(inner.target)):
                    setattr(graph.owning_module, str(inner.target), getattr(body, str(inner.target)))
                copied[inner] = graph.node_copy(inner, copied.__getitem__)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} reads all results of {node} at once"
        user.replace_all_uses_with(returned[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
