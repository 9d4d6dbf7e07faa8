"""What `torch.cond` and `torch.while_loop` take: in PyTorch, with bodies on engines, as layers of an engine.

    python bench/control_flow.py

One thread; peers run in interleaved rounds in one process; figures are medians in milliseconds.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import intarsia
from intarsia.timing import race


class Cells(nn.Module):
    """An RNN cell in a loop over time."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.hidden, self.taken, self.steps = nn.Linear(width, width), nn.Linear(width, width), steps

    def forward(self, xs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        def turn(i: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = xs.index_select(0, i.reshape(1))[0]
            return i + 1, torch.tanh(self.hidden(h) + self.taken(x))

        return torch.while_loop(lambda i, h: i < self.steps, turn, (torch.tensor(0), state))[1]


class Roots(nn.Module):
    """Newton's method, until no element moves much."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def turn(old: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y.clone(), (y + x / y) / 2

        return torch.while_loop(lambda old, y: (old - y).abs().max() > 1e-5, turn, (x + 2, x + 1))[1]


class EarlyExit(nn.Module):
    """Layers that are left out where a head is sure of its answer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.first, self.rest = nn.Sequential(*layers[: depth // 2]), nn.Sequential(*layers[depth // 2 :])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        sure = self.head(x).softmax(-1).amax() > 0.5
        return torch.cond(sure, lambda y: self.head(y), lambda y: self.head(self.rest(y)), (x,))


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Models with an example."""
    cells = {
        f"RNN cell of {width}, {steps} turns": (
            Cells(width, steps),
            (torch.randn(steps, 1, width), torch.randn(1, width)),
        )
        for width, steps in ((16, 64), (64, 64), (64, 512), (256, 64), (512, 64))
    }
    return {
        **cells,
        "Newton's method on 100 numbers": (Roots(), (torch.rand(100) + 1,)),
        "early exit, 2 of 4 layers of 64": (EarlyExit(64, 4), (torch.randn(1, 64),)),
        "early exit, 6 of 12 layers of 512": (EarlyExit(512, 12), (torch.randn(8, 512),)),
    }


def compiled(model: nn.Module, example: tuple[Any, ...], engine: str) -> nn.Module:
    """The model on one engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return intarsia.compile(model, example, engines=[engine], min_block_size=1)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("", "PyTorch", "bodies on OpenVINO", "layer of ONNX Runtime", "by default")
    for name, (model, example) in models().items():
        model.eval()
        peers = {
            "pytorch": model,
            "bodies": compiled(model, example, "openvino"),
            "layer": compiled(model, example, "onnxruntime"),
            "default": intarsia.compile(model, example),
        }
        with torch.no_grad():
            calls = {peer: partial(run, *example) for peer, run in peers.items()}
            times = race(calls, rounds=15)
        table.add_row(name, *(f"{times[peer].median * 1e3:.3g}" for peer in peers))
    Console().print(table)


if __name__ == "__main__":
    main()
