"""Which operators give the same answer each time: torch's own say so, others only if their author does.

torch has no tag for "reads no clock and draws nothing", and merging two draws is a wrong answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intarsia.lower.decompositions import OperatorSet

pure_operators: OperatorSet = OperatorSet("pure_operators")
pure_operators.__doc__ = """Operators outside torch that give the same answer for the same arguments.

Nothing in torch says of a custom operator whether it draws random numbers or reads a clock, so those not in
this set are never computed while compiling, shared between equal calls, or dropped where nobody reads them.

>>> from intarsia.lower.purity import pure_operators
>>> pure_operators.add(torch.ops.mylib.scale)  # doctest: +SKIP
"""
# Arguments that switch drawing off, with the value that does.
_OFF = {"dropout_p": 0, "dropout": 0, "train": False, "training": False}
_PURE = frozenset({"aten", "prims", "quantized_decomposed", "intarsia"})  # namespaces: torch's and ours


def is_pure_operator(target: torch._ops.OpOverload) -> bool:
    """Whether an operator computes from its arguments alone and changes nothing, whatever they are."""
    return _is_declared(target) and torch.Tag.nondeterministic_seeded not in target.tags


def is_pure(node: fx.Node) -> bool:
    """Whether a node gives the same answer each time and changes nothing."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(target, torch._ops.OpOverload) or is_pure_operator(target):
        return True
    return _is_declared(target) and not draws(node)


def draws(node: fx.Node) -> bool:
    """True for nodes that draw random numbers; attention without dropout is none of them.

    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> draws(graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (q, q, q)))
    False
    >>> draws(graph.call_function(torch.ops.aten.rand_like.default, (q,)))
    True
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    off = _OFF | ({"p": 0} if target is torch.ops.aten.dropout.default else {})
    for argument in target._schema.arguments:
        if argument.name in off:
            default = argument.default_value if argument.has_default_value() else None
            value = given.get(argument.name, default)
            if isinstance(value, bool | int | float) and value == off[argument.name]:
                return False
    return True


def _is_declared(target: torch._ops.OpOverload) -> bool:
    """Whether an operator changes nothing, and its author answers for what it reads."""
    if target._schema.is_mutable:
        return False
    return target.namespace in _PURE or target in pure_operators
