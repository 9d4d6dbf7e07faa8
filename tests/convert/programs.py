"""Small functions as graphs of ATen operators, the way export makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.functions import Function
from torch import fx
from torch.export import Dim, export

from intarsia.convert import registry
from intarsia.convert.evaluators import EVALUATORS
from intarsia.lower import lower


def lowered_program(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: tuple[dict[int, Dim], ...]
) -> fx.GraphModule:
    """The graph as compiling sees it: decomposed where it must be, passes run."""
    exported = export(Function(function), inputs, dynamic_shapes=(dynamic,), strict=False)
    return lower(exported, registry.__contains__).module


def program_of(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: tuple[dict[int, Dim], ...] | None = None
) -> fx.GraphModule:
    """The graph of a function of tensors; tensors it closes over are frozen."""
    shapes = None if dynamic is None else (tuple(d or None for d in dynamic),)
    exported = export(Function(function), inputs, dynamic_shapes=shapes, strict=False)
    if any(_is_taken_apart(node) for node in exported.graph.nodes):
        return lower(exported, registry.__contains__).module
    module = exported.module()
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if _is_guard(node):
            continue
        if node.op == "output":
            values[node] = graph.output(
                [values[n] for n in node.all_input_nodes] if node.all_input_nodes else []
            )
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
    made = fx.GraphModule(module, graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def _is_taken_apart(node: fx.Node) -> bool:
    known = node.target in registry or node.target in EVALUATORS or _is_guard(node)
    return isinstance(node.target, torch._ops.OpOverload) and not known


def _is_guard(node: fx.Node) -> bool:
    # export checks its inputs in a submodule of its own and asserts on sizes: neither computes anything.
    if node.op == "call_module":
        return True
    return node.op == "call_function" and "assert" in str(node.target)
