"""A segment: nodes that run together on one engine, and the nodes it recomputes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from intarsia.graph.nodes import is_compute, is_free, producer

PYTORCH = "pytorch"  # the engine that takes every node, always the last


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run together on one engine.

    `reasons` holds, for each node, why engines of higher priority refused it. `recomputed` are nodes of other
    segments that this segment computes again instead of receiving their values: views of inputs and weights,
    and values that depend on no input.
    """

    engine: str
    nodes: tuple[fx.Node, ...]
    do_not_merge: bool = False
    reasons: Mapping[fx.Node, Mapping[str, str]] = field(default_factory=dict)
    recomputed: tuple[fx.Node, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)


Test = Callable[[fx.Node], bool]


def find_recomputed(graph: fx.Graph, cheap: Test, at_hand: Test) -> dict[fx.Node, None]:
    """The `cheap` nodes that are computed from sizes, values `at_hand` in every piece, and each other.

    Placement recomputes views of inputs and weights, and fresh constants. A pipeline recomputes everything
    that depends on no input and no parameter: masks, positions, tables.
    """
    nodes: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if not is_compute(node) or not cheap(node):
            continue
        if all(at_hand(v) or producer(v) in nodes or _is_number(v) for v in node.all_input_nodes):
            nodes[node] = None
    return nodes


def readers_of(
    graph: fx.Graph, recomputed: Mapping[fx.Node, None], home: Mapping[fx.Node, int]
) -> dict[fx.Node, dict[int, None]]:
    """The segments that read each recomputed node, directly or through free and other recomputed nodes."""
    readers: dict[fx.Node, dict[int, None]] = {}
    for node in reversed(graph.nodes):
        if node not in recomputed and (not is_free(node) or node.op != "call_function"):
            continue
        segments: dict[int, None] = {}
        for user in node.users:
            segments.update({home[user]: None} if user in home else readers.get(user, {}))
        readers[node] = segments
    return readers


def _is_number(node: fx.Node) -> bool:
    return is_free(node) and node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor)
