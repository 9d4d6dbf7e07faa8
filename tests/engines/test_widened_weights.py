"""Weights that a model keeps in 8 bits and widens itself: exact without a tolerance, tables always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engines.test_quantized import BY_ENGINE
from torch import Tensor, nn

import intarsia
from intarsia.compare import relative_error
from intarsia.convert.aten.quantize import HAS_QUANTIZED
from intarsia.engines import PyTorch

EXACT = pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])


def integers(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


class Widened(nn.Module):
    """A product with a weight of 2 MB in 8 bits: more than is folded while compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", integers(2048, 1024))
        self.register_buffer("scale", torch.rand(2048, 1) / 500 + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale).relu() + 1


class Table(nn.Module):
    """An embedding with a scale for each column, which OpenVINO's kernel for tables does not know."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("table", integers(rows, columns))
        self.register_buffer("scale", torch.rand(columns) / 500 + 1e-3)
        self.first, self.second = nn.Linear(columns, 64), nn.Linear(64, 4)

    def widened(self) -> Tensor:
        return self.table.float() * self.scale

    def forward(self, places: Tensor) -> Tensor:
        found = nn.functional.embedding(places, self.widened())
        return self.second(self.first(found).relu())


class QuantizedTable(Table):
    def widened(self) -> Tensor:
        zero = torch.zeros(len(self.scale), dtype=torch.int64)
        dequantize = torch.ops.quantized_decomposed.dequantize_per_channel
        return dequantize(self.table, self.scale, zero, 1, -127, 127, torch.int8)


@EXACT
@pytest.mark.parametrize("example", [torch.ones(4, 1024), torch.zeros(4, 1024)], ids=["ones", "zeros"])
def test_activations_are_not_rounded(engine: str, example: Tensor) -> None:
    # An example of one value does not tell whether activations are rounded to 8 bits; other calls do.
    model, x = Widened().eval(), torch.randn(4, 1024, generator=torch.Generator().manual_seed(1))
    fast = intarsia.compile(model, (example,), engines=engine)
    assert fast.plan.engines == (engine,)
    assert relative_error(fast(x), model(x)) < 1e-5


@EXACT
def test_a_table_with_a_scale_for_each_column(engine: str) -> None:
    model, places = Table(30000, 64).eval(), torch.arange(210).reshape(3, 70)
    fast = intarsia.compile(model, (places,), engines=engine)
    assert fast.plan.engines == (engine,)
    for call in (places, places + 29000):
        assert relative_error(fast(call), model(call)) < 1e-5


@pytest.mark.skipif(not HAS_QUANTIZED, reason="this torch has no quantized_decomposed operators")
@BY_ENGINE
@pytest.mark.parametrize(("rows", "columns"), [(1000, 64), (12, 50)])
def test_a_table_within_a_tolerance(engine: Any, rows: int, columns: int) -> None:
    model, places = QuantizedTable(rows, columns).eval(), torch.arange(21).reshape(3, 7) % rows
    fast = intarsia.compile(
        model, (places,), engines=[engine, PyTorch()], tolerance=0.1, partition=intarsia.Measured(budget_s=2)
    )
    assert relative_error(fast(places), model(places)) < 0.1
