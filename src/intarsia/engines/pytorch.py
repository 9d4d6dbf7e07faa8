"""PyTorch itself: the engine that takes every operator, asked last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from intarsia.engines.base import Engine, GraphEngine, GraphProgram, Program, Workload
from intarsia.engines.graph_rewrites import (
    REWRITES,
    apply_rewrites,
    image_convolutions,
    one_row_products,
    own_copy,
)


@dataclass(frozen=True)
class PyTorch(GraphEngine):
    """Runs a piece operator by operator, after the given `rewrites` (see `graph_rewrites`).

    >>> PyTorch().unavailable() is None
    True
    """

    rewrites: tuple[str, ...] = ()
    name: ClassVar[str] = "pytorch"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    capturable: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        unknown = [name for name in self.rewrites if name not in REWRITES]
        return f"there is no rewrite {unknown[0]!r}; known are {', '.join(REWRITES)}" if unknown else None

    @classmethod
    def is_default(cls, device: str) -> bool:
        return True

    def runs_on(self, device: str) -> bool:
        return True

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        """With rewrites that would change something. They cost no build, so no budget is needed."""
        if self.rewrites:
            return []
        rewrites: list[tuple[str, ...]] = []
        if one_row_products(workload.module):
            rewrites.append(("vector_products",))
        if image_convolutions(workload.module):  # folded batch norms leave fewer tensors to lay out
            rewrites.append(("batch_norms", "channels_last"))
        return [(names[-1], replace(self, rewrites=names)) for names in rewrites]

    def build(self, module: fx.GraphModule) -> Program:
        if not self.rewrites:
            return GraphProgram(module)
        copy = own_copy(module)
        apply_rewrites(copy, self.rewrites)
        return GraphProgram(copy)
