"""The support table: which engine takes which node, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from intarsia.errors import PartitionError
from intarsia.graph.segment import PYTORCH as PYTORCH


@dataclass(frozen=True, eq=False)
class SupportTable:
    """Engines in priority order, and for every refused node the reason of each engine.

    The last engine is `"pytorch"`, which takes every node.

    Example:
        >>> table = SupportTable(("onnxruntime", "pytorch"), {})
        >>> table.engines
        ('onnxruntime', 'pytorch')
    """

    engines: tuple[str, ...]
    refusals: Mapping[fx.Node, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.engines or self.engines[-1] != PYTORCH:
            raise PartitionError(
                f"engines={self.engines!r} must end with {PYTORCH!r}, which takes every node"
            )
        if len(set(self.engines)) != len(self.engines):
            raise PartitionError(f"engines={self.engines!r} names an engine twice")
        object.__setattr__(self, "refusals", MappingProxyType(dict(self.refusals)))

    def accepts(self, node: fx.Node, engine: str) -> bool:
        """True when `engine` takes `node`."""
        return engine == PYTORCH or engine not in self.refusals.get(node, ())

    def choice(self, node: fx.Node) -> str:
        """The first engine, in priority order, that takes `node`."""
        refused = self.refusals.get(node)
        if not refused:
            return self.engines[0]
        return next(engine for engine in self.engines if engine == PYTORCH or engine not in refused)

    def reasons(self, node: fx.Node, engine: str) -> dict[str, str]:
        """Why the node is not on an engine before `engine`: the reason of each."""
        refused = self.refusals.get(node)
        if not refused:
            return {}
        before = self.engines[: self.engines.index(engine)]
        return {name: refused[name] for name in before if name in refused}

    def with_refusals(self, more: Mapping[fx.Node, Mapping[str, str]]) -> SupportTable:
        """A new table with further refusals. Existing reasons stay."""
        merged = dict(self.refusals)
        for node, reasons in more.items():
            merged[node] = {**reasons, **merged.get(node, {})}
        return replace(self, refusals=merged)

    def with_engines(self, engines: tuple[str, ...]) -> SupportTable:
        """A new table over other engines or another order. Existing reasons stay."""
        return replace(self, engines=engines)
