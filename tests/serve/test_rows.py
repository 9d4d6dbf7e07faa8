"""Batching is on only where no row sees another: a table of models, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.harness import Scores, compiled
from torch import nn
from torch.export import Dim
from torch.nn import functional

from intarsia.serve.interface import Interface
from intarsia.serve.queue import decide

Function = Callable[..., Any]


class Of(nn.Module):
    """A function as a model, with weights for it to use."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(4)
        self.conv, self.lstm = nn.Conv1d(4, 4, 3, padding=1), nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.register_buffer("table", torch.randn(16, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def batching(function: Function, low: int = 1, high: int = 16) -> tuple[int, str]:
    example = torch.randn(min(max(low, 3), high), 4, 6)
    made = compiled(Of(function), (example,), {"x": {0: Dim("rows", min=low, max=high)}})
    found = decide(Interface.of(made), 8)
    return found.rows, found.why_not


APART: dict[str, Function] = {
    "linear": lambda m, x: functional.gelu(m.linear(x)),
    "softmax over features": lambda m, x: x.softmax(-1),
    "flattened": lambda m, x: functional.relu(m.linear(x.reshape(-1, 6))).reshape(x.shape[0], 4, 6),
    "flattened to one line a row": lambda m, x: x.flatten(1),
    "folded under another axis": lambda m, x: (
        m.linear(x.transpose(0, 1).reshape(-1, 6)).view(4, x.shape[0], 6).transpose(0, 1)
    ),
    "heads": lambda m, x: (
        x.view(x.shape[0], 4, 2, 3).transpose(1, 2).reshape(x.shape[0] * 2, 4, 3).view(-1, 24)
    ),
    "turned and back": lambda m, x: (x.permute(1, 0, 2) + 1).cumsum(0).permute(1, 0, 2),
    "attention of each with itself": lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "scaled_dot_product_attention": lambda m, x: functional.scaled_dot_product_attention(x, x, x),
    "multi-head attention": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "batch norm in evaluation": lambda m, x: m.norm(x),
    "convolution": lambda m, x: functional.max_pool1d(m.conv(x), 2),
    "lstm": lambda m, x: m.lstm(x)[0],
    "a token put before every row": lambda m, x: torch.cat([m.table[:1].expand(x.shape[0], 1, 6), x], 1),
    "its own row picked by number": lambda m, x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)],
    "a mask of zeros": lambda m, x: torch.where(x > 0, x, x.new_zeros(x.shape[0], 4, 6)),
    "two outputs": lambda m, x: (x.mean((1, 2)), {"top": x.topk(2, dim=1)[0]}),
    "split and joined": lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "einsum": lambda m, x: torch.einsum("bij,kj->bik", x, m.table),
    "all rows taken": lambda m, x: x[:, 1:] * 2,
    "embedding": lambda m, x: functional.embedding((x.abs() % 16).long(), m.table),
    "indexed by constants": lambda m, x: x[:, torch.tensor([0, 2, 1])],
    "padded": lambda m, x: functional.pad(x, (1, 1)),
    "norms": lambda m, x: functional.layer_norm(x, (6,)) + functional.normalize(x, dim=-1),
}

MIXED: dict[str, tuple[Function, str]] = {
    "mean over the batch": (lambda m, x: x - x.mean(0, keepdim=True), "reduces the batch"),
    "mean over all": (lambda m, x: x - x.mean(), "reduces the batch"),
    "softmax over the batch": (lambda m, x: x.softmax(0), "along the batch"),
    "cumsum over the batch": (lambda m, x: x.cumsum(0), "along the batch"),
    "flip": (lambda m, x: x.flip(0), "along the batch"),
    "roll": (lambda m, x: x.roll(1, 0), "along the batch"),
    "roll of everything": (lambda m, x: x.roll(1), "batch"),
    "sort": (lambda m, x: x.sort(0)[0], "along the batch"),
    "rows against rows": (lambda m, x: x.flatten(1) @ x.flatten(1).T, "batch"),
    "attention over rows": (
        lambda m, x: functional.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3),
        "row",
    ),
    "divided by their number": (lambda m, x: x / x.shape[0], "size of the batch"),
    "at most 8 of them": (lambda m, x: x * torch.full((1,), float(min(x.shape[0], 8))), ""),
    "numbered": (lambda m, x: x + torch.arange(x.shape[0]).view(-1, 1, 1), "numbers of rows"),
    "the first few": (lambda m, x: x[:2].sum(0, keepdim=True) + x, "some rows"),
    "all but the last": (lambda m, x: functional.pad(x[:-1], (0, 0, 0, 0, 1, 0)), "some rows"),
    "the first row": (lambda m, x: x + x[0], "one row"),
    "doubled": (lambda m, x: torch.cat([x, x])[: x.shape[0]], "concatenates batches"),
    "batch norm by its own mean": (
        lambda m, x: functional.batch_norm(x, None, None, training=True),
        "batch_norm",
    ),
    "convolution over the batch": (lambda m, x: m.conv(x.transpose(0, 1).reshape(4, -1)[None]), ""),
    "picked among rows": (lambda m, x: x[torch.zeros(1, dtype=torch.long)] + x, "all rows"),
    "random": (lambda m, x: x + torch.rand_like(x), "random"),
    "not the first axis": (lambda m, x: x.transpose(0, 1) + 1, "first axis"),
    "a constant beside": (lambda m, x: (x, m.table + 1), "first axis"),
    "batch norm over the batch as channel": (lambda m, x: functional.group_norm(x.transpose(0, 1), 1), ""),
    "cond": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        "",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_rows_apart(name: str) -> None:
    rows, why_not = batching(APART[name])
    assert rows == 8, why_not


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet(name: str) -> None:
    function, said = MIXED[name]
    rows, why_not = batching(function)
    assert rows == 0
    assert said in why_not and why_not


def test_a_batch_that_cannot_be() -> None:
    assert batching(lambda m, x: x + 1, 1, 1 + 1)[0] == 2
    assert batching(lambda m, x: x + 1, 3, 5)[0] == 5
    fixed = compiled(nn.ReLU(), (torch.ones(2, 3),), None)
    assert "fixed size" in decide(Interface.of(fixed), 8).why_not


def test_inputs_that_vary_each_by_itself() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x + 1, y + 1

    shapes = {"x": {0: Dim("a", max=9)}, "y": {0: Dim("b", max=9)}}
    two = compiled(Two(), (torch.ones(2, 3), torch.ones(3, 3)), shapes)
    assert "are different sizes" in decide(Interface.of(two), 8).why_not


def test_a_module_that_remembers() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    made = compiled(Counts(), (torch.ones(2, 3),), {"x": {0: Dim("rows", max=9)}})
    assert "buffers" in decide(Interface.of(made), 8).why_not


def test_an_engine_that_mixes_is_found_out() -> None:
    """The graph keeps rows apart; what runs does not, and the trial sees it."""
    made = compiled(Of(lambda m, x: x * 2), (torch.randn(3, 4, 6),), {"x": {0: Dim("rows", max=16)}})
    made.run_by(lambda inputs: [inputs[0] * 2 + inputs[0].mean()])
    assert "a batch differs from its rows" in decide(Interface.of(made), 8).why_not


def test_words_are_batched() -> None:
    rows = Dim("rows", min=1, max=16)
    example = (torch.randint(0, 20, (3, 5)), torch.rand(3, 5))
    made = compiled(Scores(), example, {"words": {0: rows}, "weights": {0: rows}})
    assert decide(Interface.of(made), 32).rows == 16


STEPS: list[Function] = [
    lambda x: x.relu() + 1,
    lambda x: x.softmax(0),
    lambda x: x.softmax(-1),
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(1, 2),
    lambda x: x.flip(0),
    lambda x: x.flip(1),
    lambda x: x.cumsum(0),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x - x.amax(2, keepdim=True),
    lambda x: x.reshape(x.shape[1], x.shape[0], -1),
    lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1]),
    lambda x: x.flatten(0, 1).unsqueeze(0),
    lambda x: x.flatten(0, 1).unsqueeze(1),
    lambda x: torch.cat([x, x * 2], 0),
    lambda x: torch.cat([x, x * 2], 1),
    lambda x: x @ x.transpose(1, 2),
    lambda x: x[:, :1],
    lambda x: x[:1] + x,
    lambda x: x * x.shape[0],
    lambda x: x.new_ones(x.shape[0], 1, 1) * x,
]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(range(len(STEPS))), min_size=1, max_size=5))
def test_what_is_said_to_be_apart_is_apart(steps: list[int]) -> None:
    """Random chains of steps, half of which mix rows: batching on means that rows alone answer the same."""

    def function(m: Of, x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = STEPS[step](x)
        return x

    model = Of(function).eval()
    made = compiled(model, (torch.randn(3, 4, 6),), {"x": {0: Dim.AUTO(min=1, max=16)}})
    if not decide(Interface.of(made), 8).rows:
        return
    x = torch.randn(7, 4, 6)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)
