"""Autocast around a model changes its answers: it is compiled where it is written, and elsewhere refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Inside(nn.Module):
    """Computes in bfloat16 by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


class Gated(Inside):
    """What torch.export cannot take: its body is compiled by itself, and called under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if float(y.sum()) > 1e9 else y


def plain() -> nn.Module:
    return Inside().body.eval()


@pytest.mark.parametrize("door", [intarsia.compile, intarsia.explain])
def test_compiling_under_autocast_is_refused(door) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=r"torch\.autocast\('cpu', torch\.bfloat16\) is on while compiling"),
    ):
        door(plain(), (X,))


def test_a_call_under_autocast_is_refused_and_says_what_to_do() -> None:
    model = plain()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputError, match=r"around this call.*torch\.autocast\('cpu', enabled=False\)"):
            fast(X)
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_model_that_runs_as_it_is_follows_autocast() -> None:
    class Unlike(nn.Module):
        """Captured, it is another model, so that PyTorch runs it."""

        def __init__(self) -> None:
            super().__init__()
            self.body = plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * (3 if torch.compiler.is_exporting() else 1)

    model = Unlike().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    assert any("runs as it is" in note for note in fast.notes)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(X), model(X))


def test_autocast_inside_forward_is_compiled() -> None:
    model = Inside().eval()
    with torch.no_grad():
        expected = model(X)
        answer = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)(X)
    assert answer.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(answer, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch for this call")
def test_a_part_that_is_called_under_autocast_answers_as_the_module() -> None:
    model = Gated().eval()
    fast = intarsia.compile(model, (X,), engines=["onnxruntime"], min_block_size=1)
    with torch.no_grad():
        expected = model(X + 1)
        assert fast(X + 1).dtype == expected.dtype
        torch.testing.assert_close(fast(X + 1), expected)
