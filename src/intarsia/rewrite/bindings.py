"""What a pattern is bound to where it matches: its variables, its layers, and who else reads of them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intarsia.rewrite.term import OpTerm


class Bindings:
    """One way a pattern matches: variables, named layers, and the layers of the match."""

    __slots__ = ("layers", "nodes", "roots", "variables")

    def __init__(self, *roots: ir.Value) -> None:
        self.variables: dict[str, ir.Value | None] = {}
        self.nodes: dict[OpTerm, ir.Node] = {}
        self.layers: dict[ir.Node, bool] = {}  # whether others may read it
        self.roots: list[Any] = list(roots)

    def copy(self) -> Bindings:
        other = Bindings()
        other.variables, other.nodes = dict(self.variables), dict(self.nodes)
        other.layers, other.roots = dict(self.layers), list(self.roots)
        return other


def outside_read(state: Bindings) -> tuple[Any, ...] | None:
    """What layers outside the match read of it besides its outputs: a message and its parts, or None."""
    layers, roots = state.layers, state.roots
    for node, shared in layers.items():
        if shared:
            continue
        for value in node.outputs:
            if value in roots:
                continue
            if value.is_graph_output():
                return ("{} is an output of the network", value)
            uses = value.uses()
            if len(uses) <= 1 and len(node.outputs) == 1:
                continue  # the one reader is the layer of the match it was reached from
            if len(uses) > sum(len(other.inputs) for other in layers):
                return ("{} is read by {} layers", value, len(uses))
            for user, _ in uses:
                if user not in layers:
                    return ("{} is also read by {}", value, user)
    return None
