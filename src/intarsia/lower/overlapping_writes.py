"""Writes into expanded tensors, whose memory a view may show more than once.

Functionalised, a write into an expanded tensor becomes `base + sum(written - shown)`: an infinity turns into
NaN there, and what is small beside the old value is lost; also where the expansion repeats nothing. Such a
model is not lowered.
"""

from __future__ import annotations

import torch
from torch import fx

from intarsia.errors import LoweringError
from intarsia.lower.aliases import alias_of, may_copy, written_arguments

_EXPANSIONS = (
    "aten::expand",
    "aten::expand_as",
    "aten::broadcast_to",
    "aten::broadcast_tensors",
    "aten::meshgrid",
)


def refuse_overlapping_writes(graph: fx.Graph) -> None:
    """Raise where a node changes an expanded tensor, or a view of one, in place."""
    for node in graph.nodes:
        for held in written_arguments(node):
            shown = _expanded(held)
            if shown is not None:
                raise LoweringError(
                    f"{node.target} ({node.name}) changes a view of {shown.name} ({shown.target}) in place, "
                    "which may show the same memory several times; clone() it before writing to it"
                )


def _expanded(node: fx.Node) -> fx.Node | None:
    """The expansion behind a tensor, itself included."""
    at: fx.Node | None = node
    while at is not None:
        if isinstance(at.target, torch._ops.OpOverload) and at.target._schema.name in _EXPANSIONS:
            return at
        base = alias_of(at)
        if base is not None and may_copy(at) and _strides(at) != _strides(base):
            return None  # it copied
        at = base
    return None


def _strides(node: fx.Node) -> list[str]:
    """As texts: comparing sizes that vary would fix them."""
    value = node.meta.get("val")
    return list(map(str, value.stride())) if isinstance(value, torch.Tensor) else []
