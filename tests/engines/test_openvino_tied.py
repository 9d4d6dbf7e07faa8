"""One weight in several products: by rows and by columns, and filters in both directions."""

from __future__ import annotations

import pytest
import torch
from tests.processors import BFLOAT16
from torch import nn
from torch.nn import functional as F

import intarsia
from intarsia.engines.openvino.corrections import separate

pytestmark = pytest.mark.openvino

SIZE = 64


class Products(nn.Module):
    def __init__(self, rows: int = SIZE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, SIZE) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.linear(x, self.weight)) @ self.weight


class Straight(Products):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) @ self.weight


class Reshaped(Products):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = self.weight.reshape(8, 8, SIZE).reshape(SIZE, SIZE)
        return x @ square, F.linear(x, square), x @ square.t(), (square @ x.t()).t()


class Viewed(nn.Module):
    """As many rows and columns, of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE // 2) / 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x[:, : SIZE // 2]
        return F.linear(half, self.weight), half @ self.weight.view(SIZE // 2, SIZE)


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 3, 3) / 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(F.conv2d(x, self.weight, padding=1), self.weight, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("rows", [1, 4, 128])
@pytest.mark.parametrize("kind", [Products, Straight, Reshaped, Viewed])
def test_a_weight_is_read_by_rows_and_by_columns(
    kind: type[nn.Module], rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    _agrees(kind().eval().to(dtype), torch.randn(rows, SIZE).to(dtype))


def test_a_filter_is_used_in_both_directions() -> None:
    torch.manual_seed(0)
    _agrees(Filters().eval(), torch.randn(2, 16, 8, 8))


@pytest.mark.parametrize(("rows", "memories"), [(SIZE, 2), (2 * SIZE, 1)])
def test_only_what_could_be_mistaken_is_copied(rows: int, memories: int) -> None:
    """Of a matrix that is not square the packed forms have different sizes."""
    import numpy as np
    import openvino
    from openvino import opset13 as ov

    x = ov.parameter([4, SIZE], np.float32)
    weight = ov.constant(np.ones((rows, SIZE), np.float32))
    product = ov.matmul(ov.matmul(x, weight, False, True), weight, False, False)
    model = openvino.Model([product], [x])
    separate(model)
    assert len([op for op in model.get_ops() if op.get_type_name() == "Constant"]) == memories


def _agrees(model: nn.Module, x: torch.Tensor) -> None:
    # Unverified: what an engine answers wrongly would otherwise run in PyTorch.
    fast = intarsia.compile(model, (x,), engines=["openvino"], min_block_size=1, verify=False)
    assert fast.plan.engines == ("openvino",)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
