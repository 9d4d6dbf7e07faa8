"""Attention of a decoder's token: its kernel turns queries and keys, and writes what the cache gets."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from intarsia.engines.graph_rewrites.constants import shape_of
from intarsia.engines.kernels.operators import stacked, token_attention, turned_token_attention

aten = torch.ops.aten


def turned_attention(module: fx.GraphModule) -> int:
    """Move the turning of queries and keys into the attention that reads them; how often it was."""
    found = 0
    graph = module.graph
    slices: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node.target is not token_attention._opoverload:
            continue
        query, past_keys, past_values, key, value, mask, scale = node.args
        turned, other = _turned(query), _turned(key)
        if turned is None or other is None or turned[1:] != other[1:]:
            continue
        with graph.inserting_before(node):
            operands = (turned[0], past_keys, past_values, other[0], value, mask, scale, *turned[1:])
            made = graph.call_function(turned_token_attention._opoverload, operands)
            result, new = (graph.call_function(operator.getitem, (made, place)) for place in range(2))
            new_key = graph.call_function(aten.select.int, (new, 0, 0))
        result.meta, new_key.meta = dict(node.meta), dict(key.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        key.replace_all_uses_with(new_key)
        slices[new_key, value] = new
        found += 1
    if found:
        _stack(graph, slices)
        graph.eliminate_dead_code()
    return found


def _turned(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """`x`, `cos`, `sin` of `x * cos + cat([-second half, first half]) * sin`."""
    if (
        not isinstance(node, fx.Node)
        or node.target is not aten.add.Tensor
        or len(node.args) != 2
        or node.kwargs
    ):
        return None
    plain: Any
    crossed: Any
    plain, crossed = node.args
    if not all(isinstance(arg, fx.Node) and arg.target is aten.mul.Tensor for arg in (plain, crossed)):
        return None
    (x, cos), (swapped, sin) = plain.args, crossed.args
    shape = shape_of(x)
    if (
        shape is None
        or len(shape) != 4
        or swapped.target is not aten.cat.default
        or swapped.args[1] not in (-1, 3)
    ):
        return None
    if any((shape_of(angle) or ())[1:] != (1, 1, shape[3]) for angle in (cos, sin)):
        return None
    negated, first = swapped.args[0]
    half = shape[3] // 2
    if negated.target is not aten.neg.default or not _is_part(first, x, 0, half):
        return None
    return (x, cos, sin) if _is_part(negated.args[0], x, half, shape[3]) else None


def _is_part(node: Any, x: fx.Node, start: int, end: int) -> bool:
    if node.target is not aten.slice.Tensor or node.args[0] is not x or len(node.args) != 4:
        return False
    axis, begin, stop = node.args[1:]
    return axis in (3, -1) and begin == start and (stop == end or (end > start > 0 and stop >= end))


def _stack(graph: fx.Graph, slices: dict[tuple[fx.Node, fx.Node], fx.Node]) -> None:
    """Where keys and values of all layers are stacked in turn, stack what the kernels have written."""
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node.target is not aten.stack.default:
            continue
        parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
        news = [slices.get(pair) for pair in zip(parts[::2], parts[1::2], strict=False)]
        if axis != 0 or len(parts) % 2 or None in news:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(stacked._opoverload, (news,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
