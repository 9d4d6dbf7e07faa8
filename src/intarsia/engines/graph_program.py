"""A graph as a program: its generated code, operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class GraphProgram:
    """The generated code of a graph, called without gradients."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(self.module(*inputs))
