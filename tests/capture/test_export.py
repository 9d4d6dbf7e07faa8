"""What torch.export takes, compile takes; what it refuses is refused with torch's own advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.errors import CaptureError


class EnablesGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class EnablesGradInside(EnablesGrad):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.linear(x)
            with torch.no_grad():
                z = y * 2
        return y + z


class Vmapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sum() * row)(x)


class SparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.matrix, x.t()).relu()


class RefusesEval(nn.Module):
    def eval(self) -> Any:
        raise RuntimeError("no eval here")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + float(self.training)


@pytest.mark.parametrize("kind", [EnablesGrad, EnablesGradInside, Vmapped, SparseBuffer])
def test_what_export_takes_compiles(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.rand(2, 4)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(intarsia.compile(model, (x,), fallback="error")(x), expected)


def test_a_module_without_eval_is_captured_in_evaluation() -> None:
    model, x = RefusesEval(), torch.rand(2, 4)
    torch.testing.assert_close(intarsia.compile(model, (x,), fallback="error")(x), x.relu())
    assert model.training


def test_an_exported_module_compiles() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(intarsia.compile(program.module(), (x,))(x), model(x))


class Viewed(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.view(-1, 2).relu()


def test_an_exported_program_is_left_as_it_was() -> None:
    x = torch.rand(2, 4)
    program = torch.export.export(Viewed(), (x,))
    before = str(program.graph)
    for args in ((x,), ()):  # a program brings its own example
        torch.testing.assert_close(intarsia.compile(program, args)(x), Viewed()(x))
    assert str(program.graph) == before


def test_the_error_has_torchs_suggested_fixes() -> None:
    class Pinned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 2)

    with pytest.raises(
        CaptureError, match=r"(?s)Constraints violated.*specialized it to be a constant.*Suggested fixes"
    ):
        intarsia.compile(Pinned(), (torch.rand(3, 2),), dynamic_shapes=({0: Dim("rows", max=9)},))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_a_named_dim_varies_as_export_allows(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {} if name == "GPT2" else {"num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, use_cache=False)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = torch.randint(0, 50, (2, 6))
    shapes = {"input_ids": {0: Dim("batch")}}
    fast = intarsia.compile(model, kwargs={"input_ids": ids}, dynamic_shapes=shapes)
    for batch in (1, 2, 5):
        given = torch.randint(0, 50, (batch, 6))
        answer, expected = fast(input_ids=given), model(input_ids=given)
        torch.testing.assert_close(answer.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)
