"""Sizes: numbers and symbols, where a symbol can be read, its range, and the bytes of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from intarsia.graph.nodes import is_free

Range = tuple[int, int | None]
"""The smallest and the largest size; None if there is no largest."""


def constant_value(node: fx.Node) -> Any:
    """The constant value of a free node; None if it depends on the inputs."""
    value = node.meta.get("val") if node.op == "call_function" and is_free(node) else None
    return value if isinstance(value, (bool, int, float)) else None


def symbol_of(node: fx.Node) -> Any:
    """The symbolic expression of a size node, or None."""
    value = node.meta.get("val")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def symbols_of(nodes: Iterable[fx.Node]) -> dict[Any, tuple[fx.Node, int]]:
    """Where each symbolic size can be read: the first of these tensors that has it, and the axis."""
    places: dict[Any, tuple[fx.Node, int]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(size.node.expr, (node, axis))
    return places


def input_symbols(graph: fx.Graph) -> dict[Any, tuple[fx.Node, int]]:
    """The symbolic sizes of the graph's inputs, which every segment can read."""
    return symbols_of(node for node in graph.nodes if node.op == "placeholder")


def size_range(size: Any) -> Range:
    """The smallest and the largest value of a size."""
    if not isinstance(size, torch.SymInt):
        return (int(size), int(size))
    # Only the shape environment knows the bound of an expression, without a public API (torch 2.13).
    bound_of = getattr(getattr(size.node, "shape_env", None), "bound_sympy", None)
    if bound_of is None:
        return (0, None)
    bound = bound_of(size.node.expr)
    return (_number(bound.lower) or 0, _number(bound.upper))


def size_hint(size: Any) -> int:
    """A size as a number: for a symbolic one its value in the example, or 1 if it has none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else 1


def bytes_of(value: object) -> int:
    """The bytes of a value; a symbolic size counts by its hint."""
    if isinstance(value, torch.Tensor):
        count = value.element_size()
        for size in value.shape:
            count *= size_hint(size)
        return count
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    return 0


def total_bytes(nodes: Iterable[fx.Node]) -> int:
    """The bytes of all the nodes' values."""
    return sum(bytes_of(node.meta.get("val")) for node in nodes)


def _number(bound: Any) -> int | None:
    """A bound as a number, or None; torch uses numbers near 2**63 for infinity."""
    return int(bound) if bound.is_number and bound.is_finite and abs(int(bound)) < 2**62 else None
