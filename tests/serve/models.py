"""Small models to serve, compiled for a batch of 1 to 16 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.runtime import Compiled


class Scores(nn.Module):
    """A classifier over words; a word beyond the table is an IndexError, in PyTorch as on engines."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        mean = (self.table(words) * weights.unsqueeze(-1)).sum(1)
        return {"scores": self.head(mean), "state": (mean.tanh(),), "nothing": None}


def scores(engines: Any = "onnxruntime") -> tuple[nn.Module, Compiled]:
    torch.manual_seed(0)
    model, rows = Scores().eval(), Dim("rows", min=1, max=16)
    example = (torch.randint(0, 20, (3, 5)), torch.rand(3, 5))
    return model, compiled(model, example, {"words": {0: rows}, "weights": {0: rows}}, engines=engines)


def compiled(model: nn.Module, example: tuple[Any, ...], shapes: Any, engines: Any = "pytorch") -> Compiled:
    made = intarsia.compile(model.eval(), example, dynamic_shapes=shapes, engines=engines)
    assert isinstance(made, Compiled), made.notes
    return made


class Slow(nn.Module):
    """A model that takes a while: `rows` matrices multiplied again and again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = (y @ x).tanh()
        return y
