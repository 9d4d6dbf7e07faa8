"""A segment: nodes that run together on one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

PYTORCH = "pytorch"  # the engine that takes every node, always the last


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run together on one engine.

    `reasons` says, for a node that did not go to an engine of higher priority, why. `recomputed` are nodes
    that another segment holds and this one computes for itself instead of receiving their values: views of
    inputs and weights, and values that depend on no input.
    """

    engine: str
    nodes: tuple[fx.Node, ...]
    do_not_merge: bool = False
    reasons: Mapping[fx.Node, Mapping[str, str]] = field(default_factory=dict)
    recomputed: tuple[fx.Node, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)
