"""Small models of every kind that an archive has to hold, each with calls to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim


@dataclass(frozen=True)
class Specimen:
    """A model, the arguments to compile it for, and further calls."""

    model: nn.Module
    args: tuple[Any, ...]
    calls: tuple[tuple[Any, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Branches(nn.Module):
    """Control flow whose bodies hold weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def yes(y: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(y).relu()).tanh()

        return torch.cond(x.sum() > 0, yes, lambda y: y.sin() * 2, (x,)) + 1


class Loop(nn.Module):
    """A loop with a condition and a body."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def go_on(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < 4

        def body(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, (y * 0.5 + 1).tanh()

        made: tuple[torch.Tensor, torch.Tensor] = torch.while_loop(go_on, body, (torch.tensor(0), x))
        return made[1]


class Counter(nn.Module):
    """A model that changes its buffers; two of them begin equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(16))
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.total += x.sum(0)
        return self.linear(x) * self.count + self.total


class Writes(nn.Module):
    """A model that writes to its input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return (x * y).softmax(-1)


class Nested(nn.Module):
    """Arguments and results in structures, an argument by name, a constant one."""

    def forward(
        self, pair: dict[str, torch.Tensor], others: list[torch.Tensor], *, scale: float = 2.0
    ) -> dict[str, Any]:
        both = pair["a"] @ pair["b"]
        return {"both": both * scale, "rest": (others[0] + 1, [others[1].exp()]), "none": None}


class Sizes(nn.Module):
    """Sizes that vary, one of them computed of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        long = torch.cat([x, x], 0)
        return self.linear((long + y).relu()).reshape(y.shape[0] // 2, 2, 24).sum(1)


class Layouts(nn.Module):
    """Weights that are transposed, in channels_last, complex, shared and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.linear.weight
        self.register_buffer("table", torch.randint(0, 8, (8,)))
        self.register_buffer("wave", torch.randn(8, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(8, 16).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.conv(x)).mean((2, 3))
        made = self.tied(self.linear(made)[:, self.table])
        return (made * self.wave).real @ self.turned.t()


class Attention(nn.Module):
    """A small transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.embed = nn.Embedding(50, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(self.embed(ids))
        return made


def _convolutions() -> Specimen:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return Specimen(model.eval(), (torch.randn(2, 3, 8, 8),))


def _sizes() -> Specimen:
    half = Dim("half", min=2, max=40)
    options = {"dynamic_shapes": {"x": {0: half}, "y": {0: 2 * half}}}
    calls = tuple((torch.randn(n, 24), torch.randn(2 * n, 24)) for n in (2, 7, 40))
    return Specimen(Sizes().eval(), (torch.randn(3, 24), torch.randn(6, 24)), calls, options)


def _nested() -> Specimen:
    pair = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}
    return Specimen(Nested().eval(), (pair, [torch.randn(4), torch.randn(4)]))


MODELS: dict[str, Callable[[], Specimen]] = {
    "convolutions": _convolutions,
    "attention": lambda: Specimen(Attention().eval(), (torch.randint(0, 50, (2, 6)),)),
    "branches": lambda: Specimen(
        Branches().eval(), (torch.ones(4, 32),), ((torch.full((4, 32), 0.5),), (-torch.ones(4, 32),))
    ),
    "loop": lambda: Specimen(Loop().eval(), (torch.randn(4, 4),)),
    "counter": lambda: Specimen(Counter().eval(), (torch.randn(3, 16),), ((torch.randn(3, 16),),) * 3),
    "writes": lambda: Specimen(Writes().eval(), (torch.randn(4, 4), torch.randn(4, 4))),
    "nested": _nested,
    "sizes": _sizes,
    "layouts": lambda: Specimen(Layouts().eval(), (torch.randn(2, 4, 6, 6),)),
}
