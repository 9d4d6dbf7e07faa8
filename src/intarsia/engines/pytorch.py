"""PyTorch itself: the engine that takes every operator, asked last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from intarsia.engines.base import GraphEngine, Program
from intarsia.engines.graph_program import GraphProgram


@dataclass(frozen=True)
class PyTorch(GraphEngine):
    """Runs a piece operator by operator.

    >>> PyTorch().unavailable() is None
    True
    """

    name: ClassVar[str] = "pytorch"
    capturable: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        return None

    def runs_on(self, device: str) -> bool:
        return True

    def build(self, module: fx.GraphModule) -> Program:
        return GraphProgram(module)
