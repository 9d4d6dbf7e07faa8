"""Inputs as a graph describes them: sizes and strides without contents.

A file of its own, because `varying.py` imports sympy, which loading a program does without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.graph.nodes import uses_gpu

LEAST = 2  # of a size that is a symbol of Inductor's: 0 and 1 are numbers there


def has_fixed_sizes(described: torch.Tensor) -> bool:
    """Whether a tensor's sizes and strides are numbers."""
    return all(isinstance(size, int) for size in (*described.shape, *described.stride()))


def unfit_size(node: fx.Node) -> str | None:
    """Why Inductor's code cannot be for every size of what a node makes, in a clause; None if it may be.

    A size that is computed from others, such as one less than another, is known by those. On a GPU sizes
    below 2 may be: there the graph itself, in a CUDA graph, answers such calls.
    """
    described = node.meta.get("val")
    values = described if isinstance(described, list | tuple) else [described]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    for size in (*sizes, *values):
        if not isinstance(size, torch.SymInt):
            continue
        if not size.node.has_hint():
            return f"size {size} depends on values"
        if size.node.expr.is_Symbol and (reason := too_small(size)) is not None:
            return None if uses_gpu(node.graph) else reason
    return None


def too_small(size: torch.SymInt) -> str | None:
    """Why a size of an input cannot be a symbol of Inductor's, which are never 0 or 1."""
    least, _ = bounds(size)
    if least >= LEAST:
        return None
    return f"size {size} may be {least}, and sizes below {LEAST} need separate code"


def bounds(size: torch.SymInt) -> tuple[Any, Any]:
    """The least and the largest that a size may be; the latter may be without bound."""
    match = size.node.shape_env.bound_sympy(size.node.expr)
    return match.lower, match.upper


def empty_like(described: torch.Tensor) -> torch.Tensor:
    """A tensor of these sizes and strides, which are numbers."""
    sizes, strides = described.shape, described.stride()
    return torch.empty_strided(sizes, strides, dtype=described.dtype, device=described.device)
