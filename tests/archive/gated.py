"""A model that is compiled in parts: it takes a branch by the values it meets."""

from __future__ import annotations

import torch
from torch import nn

X = torch.linspace(-1, 1, 16).reshape(2, 8)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


class Gated(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tail = mlp(), mlp()
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x) * self.scale
        return self.tail(y) if float(y.sum()) > -1e9 else y - 1
