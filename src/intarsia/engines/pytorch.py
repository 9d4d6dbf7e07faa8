"""PyTorch itself: the engine that takes every operator, asked last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from intarsia.engines.base import GraphEngine, Program


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
        return _GraphProgram(module)


class _GraphProgram:
    """The generated code of a graph, called without gradients."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(self.module(*inputs))
