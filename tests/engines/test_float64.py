"""float64 keeps its digits: ONNX has numbers of 32 bits in attributes, and in the definition of GELU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intarsia

WIDTH = 16
Function = Callable[[torch.Tensor], torch.Tensor]


def _written_norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)


def _statistics() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((WIDTH,), 0.1, dtype=torch.float64), torch.full((WIDTH,), 1e-4, dtype=torch.float64)


def _written_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


CASES: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x * 1e3, approximate="tanh"),
    "gelu as models write it": lambda x: _written_gelu(x * 1e3),
    "addmm": lambda x: torch.addmm(x[:, :4], x, x.mT, beta=0.1, alpha=0.3),
    "products with a factor": lambda x: 0.3 * (x @ x.mT) + 0.1 * x[:, :4],
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), eps=1e-6),
    "a norm as models write it": _written_norm,
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), eps=1e-6),
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "batch_norm": lambda x: F.batch_norm(x, *_statistics()),
}


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x.double() * 1e-3)


@pytest.mark.parametrize("rewrite", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_digits_are_kept(name: str, rewrite: bool) -> None:
    torch.manual_seed(0)
    model, x = Of(CASES[name]).eval(), torch.randn(4, WIDTH)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1, rewrite=rewrite)
    assert fast.plan.engines == ("onnxruntime",)
    for values in (x, torch.randn(4, WIDTH)):
        torch.testing.assert_close(fast(values), model(values), rtol=1e-12, atol=1e-14)


def test_so_does_what_was_saved(tmp_path: Path) -> None:
    model, x = Of(CASES["products with a factor"]).eval(), torch.randn(4, WIDTH)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    intarsia.save(fast, tmp_path / "model.intarsia")
    loaded = intarsia.load(tmp_path / "model.intarsia")
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-12, atol=1e-14)
