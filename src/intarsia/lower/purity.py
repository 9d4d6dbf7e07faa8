"""Which operators give the same answer each time: torch's own say so, others only if their author does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.lower.decompositions import OperatorSet

pure_operators = OperatorSet("pure_operators")
pure_operators.__doc__ = """Operators outside torch that give the same answer for the same arguments.

Nothing in torch says of a custom operator whether it draws random numbers or reads a clock, so those not in
this set are never computed while compiling, shared between equal calls, or dropped where nobody reads them.

>>> from intarsia.lower.purity import pure_operators
>>> pure_operators.add(torch.ops.mylib.scale)  # doctest: +SKIP
"""
_TORCH = frozenset({"aten", "prims", "quantized_decomposed"})


def is_pure_operator(target: torch._ops.OpOverload) -> bool:
    """Whether an operator computes from its arguments alone and changes nothing."""
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target.namespace in _TORCH or target in pure_operators


def is_pure(node: fx.Node) -> bool:
    """Whether a node gives the same answer each time and changes nothing."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return not isinstance(target, torch._ops.OpOverload) or is_pure_operator(target)
