"""A run of a graph that keeps what flows into its last part, so that this part can be run again by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

_SHARE = 0.25  # of the nodes that compute
_LEAST = 8  # nodes; a smaller graph is run again as a whole


@dataclass(frozen=True, eq=False)
class Tail:
    """What a graph knows before its last part: a value for every node, None for what is not read again."""

    known: dict[fx.Node, Any]


def answer_and_tail(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Tail | None]:
    """What a graph answers, and its tail; none of a graph that is small, or writes where values lie.

    >>> import torch
    >>> class More(torch.nn.Module):
    ...     def forward(self, x):
    ...         for _ in range(20):
    ...             x = x + 1
    ...         return (x,)
    >>> (made,), tail = answer_and_tail(fx.symbolic_trace(More()), [torch.zeros(1)])
    >>> float(made), [float(value) for value in tail.known.values() if value is not None]
    (20.0, [15.0])
    """
    computing = [node for node in module.graph.nodes if node.op == "call_function"]
    if len(computing) < _LEAST or any(map(_writes, computing)):
        return tuple(module(*inputs)), None
    run = _Kept(module, computing[-int(len(computing) * _SHARE)])
    made = run.run(*inputs)
    return tuple(made), Tail(run.known)


class _Kept(fx.Interpreter):
    """Keeps what is known when a node is reached."""

    def __init__(self, module: fx.GraphModule, first: fx.Node) -> None:
        super().__init__(module)
        self._first = first
        self.known: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n is self._first:  # of values that are not read again the interpreter has let go
            nodes = list(n.graph.nodes)
            self.known = {node: self.env.get(node) for node in nodes[: nodes.index(n)]}
        return super().run_node(n)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
