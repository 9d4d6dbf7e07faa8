"""Constants of a graph: reading and adding them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def constant(module: fx.GraphModule, source: Any) -> torch.Tensor | None:
    """The tensor a `get_attr` node holds; None for any other value."""
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    value = getattr(module, str(source.target), None)
    return value if isinstance(value, torch.Tensor) else None


def attach(module: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    """A new constant, read by a new node where the graph inserts now."""
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, value)
    node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The only node that reads this one; None if there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The sizes a node is known to have, where all of them are numbers."""
    described = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(described, torch.Tensor) or not all(isinstance(size, int) for size in described.shape):
        return None
    return tuple(described.shape)


def pair(value: Any) -> list[int]:
    """A size for each of two dimensions, one given for both or each."""
    return list(value) * 2 if len(value) == 1 else list(value)
