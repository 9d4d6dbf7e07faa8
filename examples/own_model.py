"""A model of your own for `intarsia pipeline run`: a function that returns the model, its data and its loss.

    intarsia pipeline run examples/own_model.py:make --ranks 2 --steps 100 --curve loss.svg

`data(step)` must give the same batch on every rank and every time it is asked, so that a run that was stopped
goes on as if it had not been.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def make():
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))

    def data(step: int):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(32, 32, generator=draw)
        return (x,), x.reshape(32, 4, 8).sum(-1).argmax(-1)  # (args, target)

    return model, data, F.cross_entropy
