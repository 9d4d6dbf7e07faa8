"""Ordinary programs that answer with, index by, and convert data in ways of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests.models.case import Call, Case, program_list
from torch import nn
from torch.nn import functional as F

CASES: list[Case] = []
_program = program_list(CASES)


@dataclass
class _Answer:
    scores: torch.Tensor
    features: dict[str, torch.Tensor]
    count: int = 3


@_program("a dataclass as answer")
def _dataclass() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> _Answer:
            y = self.body(x)
            return _Answer(y.softmax(-1), {"body": y, "square": y * y})

    return Call(Model(), (torch.randn(2, 8),))


class _Cache:
    """Keys and values of earlier calls, as people write it."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def add(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        return torch.cat(self.keys, 1)


@_program("a cache object as argument")
def _cache() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.out = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor, cache: _Cache) -> torch.Tensor:
            keys = cache.add(self.key(x))
            return self.out((x @ keys.mT).softmax(-1) @ keys)

    return Call(Model(), (torch.randn(2, 4, 8), _Cache()))


@_program("bfloat16 throughout")
def _bfloat16() -> Call:
    body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16)).bfloat16()
    return Call(body, (torch.randn(4, 16).bfloat16(),))


@_program("float16 convolutions with a float32 head")
def _half() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).half()
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.half()).float().mean((2, 3)))

    return Call(Model(), (torch.randn(1, 3, 16, 16),))


@_program("autocast inside forward")
def _autocast() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x).float()

    return Call(Model(), (torch.randn(4, 16),))


@_program("float64 with complex numbers (FFT)")
def _fourier() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=x.shape[-1])

    return Call(Model(), (torch.randn(3, 16, dtype=torch.float64),))


@_program("boolean indexing")
def _boolean() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return y[y.sum(-1) > 0].mean(0)

    return Call(Model(), (torch.randn(16, 8),))


@_program("in-place updates of slices and a buffer")
def _mutation() -> Call:
    class Model(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))
            self.body = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x).clone()
            y[:, ::2] += 1
            y[0] = 0
            self.seen += y.sum(0)
            return y.relu_() + x.mean()

    return Call(Model(), (torch.randn(4, 8),))


@_program("a dictionary of lists in and out")
def _nested() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(6, 8)

        def forward(self, batch: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
            a, b = self.a(batch["x"][0]), self.b(batch["x"][1])
            return {"sum": a + b, "all": [a, (b, None)], "name": "answer"}

    return Call(Model(), ({"x": [torch.randn(2, 4), torch.randn(2, 6)]},))


@_program("U-Net")
def _unet() -> Call:
    def block(entering: int, leaving: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(entering, leaving, 3, padding=1), nn.BatchNorm2d(leaving), nn.ReLU())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle = nn.ModuleList([block(3, 8), block(8, 16)]), block(16, 32)
            self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
            self.join = nn.ModuleList([block(32, 16), block(16, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for down in self.down:
                x = down(x)
                kept.append(x)
                x = F.max_pool2d(x, 2)
            x = self.middle(x)
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([up(x), kept.pop()], 1))
            return x

    return Call(Model(), (torch.randn(1, 3, 32, 32),))


@_program("a graph convolution (index_add)")
def _graph() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in (self.one, self.two):
                y = layer(x)
                x = torch.zeros_like(y).index_add(0, edges[1], y[edges[0]]).relu()
            return x

    return Call(Model(), (torch.randn(10, 8), torch.randint(0, 10, (2, 30))))


@_program("a mixture of experts, routed by a loop")
def _experts() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            score, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero()[:, 0]
                if len(rows):
                    out[rows] = expert(x[rows]) * score[rows, None]
            return out

    return Call(Model(), (torch.randn(12, 16),))


@_program("TorchScript")
def _script() -> Call:
    return Call(
        torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))).eval(),
        (torch.randn(2, 8),),
    )


@_program("greedy generation, token by token")
def _generate() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
            self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                logits = self.head(self.body(self.embed(ids)))[:, -1]
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            return ids

    return Call(Model(), (torch.randint(0, 20, (2, 4)),))


@_program("a weight-normed temporal convolution network")
def _tcn() -> Call:
    weight_norm = nn.utils.parametrizations.weight_norm
    layers = [
        nn.Sequential(weight_norm(nn.Conv1d(8, 8, 3, padding=2**i, dilation=2**i)), nn.ELU())
        for i in range(3)
    ]
    return Call(nn.Sequential(*layers), (torch.randn(2, 8, 20),))


@_program("spatial transformer (grid_sample)")
def _spatial() -> Call:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.locate = nn.Sequential(
                nn.Conv2d(1, 4, 5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = F.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)

    return Call(Model(), (torch.randn(2, 1, 16, 16),))
