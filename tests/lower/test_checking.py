"""Operators that check their results stay whole: they run in PyTorch, and raise as they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia

G = torch.Generator().manual_seed(0)
ROOT = torch.randn(4, 4, generator=G)
MATRIX, RIGHT = ROOT @ ROOT.T + torch.eye(4), torch.randn(4, 2, generator=G)
FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "inv": lambda a, b: torch.linalg.inv(a) @ b + 1,
    "inverse": lambda a, b: torch.inverse(a) * 2,
    "cholesky": lambda a, b: torch.linalg.cholesky(a) + 1,
    "solve": lambda a, b: torch.linalg.solve(a, b).relu(),
    "lu_factor": lambda a, b: torch.linalg.lu_factor(a)[0] + 1,
    "ldl_factor": lambda a, b: torch.linalg.ldl_factor(a)[0] + 1,
    "tensorinv": lambda a, b: torch.linalg.tensorinv(a, ind=1) + 1,
    "tensorsolve": lambda a, b: torch.linalg.tensorsolve(a, b[:, 0]) + 1,
    "matrix_power": lambda a, b: torch.linalg.matrix_power(a, -2) + 1,
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.function(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles(name: str) -> None:
    model = Model(name).eval()
    torch.testing.assert_close(intarsia.compile(model, (MATRIX, RIGHT))(MATRIX, RIGHT), model(MATRIX, RIGHT))


def test_raises() -> None:
    compiled = intarsia.compile(Model("inv").eval(), (MATRIX, RIGHT))
    with pytest.raises(torch.linalg.LinAlgError, match="could not be completed"):
        compiled(torch.zeros(4, 4), RIGHT)
