"""-0.0 keeps its sign where it is chosen, divided or left over: 1 / -0.0 tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia

ZEROS = torch.tensor([-0.0, 0.0, -0.0, 0.0, -3.0, 3.0, 1.0, -1.0])
OTHERS = torch.tensor([3.0, 3.0, -3.0, -3.0, 3.0, -3.0, -0.0, -0.0])
CONDITION = torch.tensor([True, False] * 4)

CHOICES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "where, both vary": lambda c, x, y: torch.where(c, x, y),
    "where, the other way": lambda c, x, y: torch.where(c, y, x),
    "where not": lambda c, x, y: torch.where(~c, x, y),
    "where, a constant second": lambda c, x, y: torch.where(c, x, 2.0),
    "where, a constant first": lambda c, x, y: torch.where(c, 2.0, x),
    "where not, a constant first": lambda c, x, y: torch.where(~c, 2.0, x),
    "where, -0.0 itself": lambda c, x, y: torch.where(c, -0.0, x),
    "masked_fill": lambda c, x, y: x.masked_fill(c, -torch.inf),
    "remainder": lambda c, x, y: torch.remainder(x, 3.0),
    "remainder of two": lambda c, x, y: torch.remainder(x, y + 5),
    "fmod": lambda c, x, y: torch.fmod(x, 3.0),
    "log_sigmoid of infinity": lambda c, x, y: nn.functional.logsigmoid(x / 0),
    "floor_divide": lambda c, x, y: torch.floor_divide(x, y.sign() * 3 + 0.5),
}


class Of(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, c: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 1 / self.function(c, x, y)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHOICES)
def test_zero_keeps_its_sign(name: str, dtype: torch.dtype, engine: str) -> None:
    pytest.importorskip(engine, reason="an engine under test")
    x, y = ZEROS.to(dtype), OTHERS.to(dtype)
    model = Of(CHOICES[name])
    fast = intarsia.compile(model, (CONDITION, x.clone().fill_(1.5), y), engines=[engine], min_block_size=1)
    torch.testing.assert_close(fast(CONDITION, x, y), model(CONDITION, x, y), equal_nan=True)
