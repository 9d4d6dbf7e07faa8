"""Guards find values by their names: weights, and those of layers that others were put in the place of."""

from __future__ import annotations

import pytest
import torch
from tests.engines.test_openvino_guards import Lambda, compiled
from tests.processors import BFLOAT16
from torch import nn

import intarsia

pytestmark = pytest.mark.openvino


class Table(nn.Module):
    """Angles of positions from a table, as GPT-J reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 512).reshape(1, 64, 8))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x * torch.gather(self.table, 1, places.unsqueeze(-1).repeat(1, 1, 8))


def test_guards_find_weights_by_their_names() -> None:
    """What is read at places that vary is a weight: its guard could not be built, and the layer had left."""
    rows, length = torch.export.Dim("rows", min=1, max=8), torch.export.Dim("length", min=2, max=60)
    model, x = Table(), torch.randn(2, 5, 8)
    shapes = {"x": {0: rows, 1: length}, "places": {1: length}}
    fast = intarsia.compile(
        model, (x, torch.arange(5)[None]), engines=["openvino"], dynamic_shapes=shapes, min_block_size=1
    )
    assert fast.plan.engines == ("openvino",)
    x, places = torch.randn(3, 60, 8), torch.randint(0, 64, (1, 60))
    torch.testing.assert_close(fast(x, places), model(x, places))
    places[0, 7] = 64
    with pytest.raises(Exception, match=r"out of (bounds|range)"):
        fast(x, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_a_sum_with_zero_makes_zero_of_its_negative(dtype: torch.dtype) -> None:
    """OpenVINO leaves such a sum out, and 1 / x then has the other sign."""
    x = torch.randn(4, 64).to(dtype)
    fast = compiled(Lambda(lambda x: 1 / (x + 0.0)), x)
    x[0, :4] = torch.tensor([-0.0, 0.0, float("nan"), float("inf")]).to(dtype)
    torch.testing.assert_close(fast(x), 1 / (x + 0.0), equal_nan=True)


class Rests(nn.Module):
    """What is guarded is a sum that was replaced, and a rest that was."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.inner(x) + 0.0
        return torch.softmax(total, -1), torch.fmod(total, 0.3)


def test_guards_find_what_was_replaced() -> None:
    torch.manual_seed(0)
    model, x = Rests().eval(), torch.randn(4, 64)
    fast = compiled(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
