"""Operator names as users write them, and the nodes they mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.nodes import op_name


def op_matcher(name: object) -> Callable[[fx.Node], bool]:
    """A test for nodes that `name` means; see `partition.options.OpName` for what a name may be.

    A packet, or a string without an overload, means all overloads.
    """
    if isinstance(name, str):
        return _string_matcher(name)
    if isinstance(name, torch._ops.OpOverloadPacket):
        return lambda node: getattr(node.target, "overloadpacket", None) is name
    if callable(name):
        return lambda node: node.target is name
    raise PartitionError(
        f"{name!r} is not the name of an operator; write e.g. 'aten::add' or torch.ops.aten.add"
    )


@cache
def _string_matcher(name: str) -> Callable[[fx.Node], bool]:
    plain = name.removeprefix("torch.ops.").replace("::", ".")
    parts = plain.split(".")
    if not all(parts) or len(parts) > 3:
        raise PartitionError(
            f"{name!r} is not the name of an operator; write e.g. 'aten::add' or 'aten::add.Tensor'"
        )
    if len(parts) == 1:
        return lambda node: op_name(node).rpartition(".")[2] == plain or op_name(node) == plain
    if len(parts) == 3:
        return lambda node: op_name(node) == plain
    # "aten.add" means every overload; "operator.mul" and "higher_order.cond" are whole names.
    return lambda node: op_name(node) == plain or op_name(node).startswith(plain + ".")
