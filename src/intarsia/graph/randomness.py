"""Which nodes draw random numbers: some operators only do when their arguments ask for it."""

from __future__ import annotations

import torch
from torch import fx

# Arguments that switch drawing off, with the value that does.
_OFF = {"dropout_p": 0, "dropout": 0, "train": False, "training": False}


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
    for argument in target._schema.arguments:
        if argument.name in _OFF:
            default = argument.default_value if argument.has_default_value() else None
            value = given.get(argument.name, default)
            if isinstance(value, bool | int | float) and value == _OFF[argument.name]:
                return False
    return True
