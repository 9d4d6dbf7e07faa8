"""What a measurement is remembered by: equal for equal layers, different where anything differs."""

from __future__ import annotations

import torch
from torch import fx, nn

from intarsia.choose.memory import contents
from intarsia.convert import registry
from intarsia.lower.model import lower_model


def _graph(model: nn.Module, *args: torch.Tensor, dynamic_shapes: object = None) -> fx.GraphModule:
    lowered, _ = lower_model(
        model.eval(), args, {}, dynamic_shapes, has_converter=registry.__contains__, drop_guards=False
    )
    return lowered.module


def _mlp(width: int = 8, *, negative_slope: float = 0.1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.LeakyReLU(negative_slope), nn.Linear(width, 8))


X = torch.ones(2, 8)


def test_weights_do_not_count() -> None:
    assert contents(_graph(_mlp(seed=0), X)) == contents(_graph(_mlp(seed=1), X))


def test_what_counts() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(x)

    class Chained(Swapped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(self.a(x))

    class Constant(nn.Module):
        def __init__(self, *rows: int) -> None:
            super().__init__()
            self.register_buffer("rows", torch.tensor(rows))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[self.rows]

    graphs = [
        _graph(_mlp(), X),
        _graph(_mlp(width=16), X),
        _graph(_mlp(negative_slope=0.2), X),
        _graph(_mlp(), torch.ones(3, 8)),
        _graph(_mlp().double(), X.double()),
        _graph(Swapped(), X),
        _graph(Chained(), X),
        _graph(Constant(0, 1), X),
        _graph(Constant(1, 0), X),
        _graph(_mlp(), X, dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},)),
    ]
    digests = [contents(graph) for graph in graphs]
    assert len(set(digests)) == len(digests)


def test_a_symbol_may_have_another_name() -> None:
    graphs = [
        _graph(_mlp(), X, dynamic_shapes=({0: torch.export.Dim(name, min=1, max=64)},))
        for name in ("n", "batch")
    ]
    assert contents(graphs[0]) == contents(graphs[1])
