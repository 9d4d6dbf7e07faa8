"""One way in which a pattern matches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intarsia.network.edit.raw import is_output, outputs_of, reads_of
from intarsia.network.edit.uses import readers
from intarsia.rewrite.term import Call


class Found:
    """One way a pattern matches: variables, named layers, and the layers of the match."""

    __slots__ = ("layers", "nodes", "roots", "variables")

    def __init__(self, *roots: ir.Value) -> None:
        self.variables: dict[str, ir.Value | None] = {}
        self.nodes: dict[Call, ir.Node] = {}
        self.layers: dict[ir.Node, bool] = {}  # whether others may read it
        self.roots = list(roots)

    def copy(self) -> Found:
        other = Found()
        other.variables, other.nodes = dict(self.variables), dict(self.nodes)
        other.layers, other.roots = dict(self.layers), list(self.roots)
        return other


def leaks(state: Found) -> tuple[Any, ...] | None:
    """What layers outside the match read of it besides its outputs: a message and its parts, or None."""
    layers, roots = state.layers, state.roots
    for node, shared in layers.items():
        made = outputs_of(node)
        if shared or (len(made) == 1 and made[0] in roots):
            continue
        for value in made:
            if value in roots:
                continue
            if is_output(value):
                return ("{} is an output of the network", value)
            count = len(reads_of(value))
            if count == 0 or (count == 1 and len(made) == 1):
                continue  # the one reader is the layer of the match it was reached from
            if count > sum([len(other.inputs) for other in layers]):
                return ("{} is read by {} layers", value, count)
            for user in readers(value):
                if user not in layers:
                    return ("{} is also read by {}", value, user)
    return None
