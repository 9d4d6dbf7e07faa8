"""Products of one row in bfloat16 as products with vectors, and which graphs have no others."""

from __future__ import annotations

import pytest
import torch
from tests.engines.rewritten import applied, lowered, targets
from torch import nn

import intarsia
from intarsia.engines import PyTorch
from intarsia.engines.base import GraphProgram
from intarsia.engines.graph_rewrites import apply_rewrites, has_only_one_row_products
from intarsia.errors import EngineError

aten = torch.ops.aten


def test_one_row_in_bfloat16_is_a_vector() -> None:
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 8)).bfloat16()
    module = lowered(model, torch.randn(1, 1, 32).bfloat16())
    x = torch.randn(1, 1, 32).bfloat16()
    expected = module(x)[0]
    assert apply_rewrites(module, ["vector_products"]) == {"vector_products": 2}
    assert {aten.mv.default, aten.addmv.default} < set(targets(module))
    assert aten.linear.default not in targets(module)
    torch.testing.assert_close(module(x)[0], expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    ("rows", "bias", "dtype"),
    [(2, False, torch.bfloat16), (2, True, torch.bfloat16), (1, False, torch.float32)],
)
def test_other_products_stay_as_they_are(rows: int, bias: bool, dtype: torch.dtype) -> None:
    model = nn.Linear(32, 64, bias=bias).to(dtype)
    assert applied(model, torch.randn(rows, 32, dtype=dtype), "vector_products")[0] == 0


def test_a_bias_is_added_before_rounding() -> None:
    """Rounded after each sum, 256 + 0.75 + 0.75 would stay 256."""
    model = nn.Linear(2, 1).bfloat16().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[256.0, 0.75]]))
        model.bias.fill_(0.75)
    module = lowered(model, torch.ones(1, 2).bfloat16())
    assert apply_rewrites(module, ["vector_products"]) == {"vector_products": 1}
    assert module(torch.ones(1, 2).bfloat16())[0].item() == 258.0


def test_a_bias_of_two_dimensions_stays_with_linear() -> None:
    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias[None])

    assert applied(Wide(32, 64).bfloat16(), torch.randn(1, 32).bfloat16(), "vector_products")[0] == 0


def test_the_program_of_a_token_has_only_products_of_one_row() -> None:
    def of(*layers: nn.Module, rows: int = 1) -> bool:
        model = nn.Sequential(*layers).bfloat16()
        return has_only_one_row_products(lowered(model, torch.randn(rows, 128).bfloat16()))

    assert of(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256, bias=False))
    assert not of(nn.Linear(128, 128), nn.Unflatten(1, (2, 64)), nn.Linear(64, 256))  # of two rows
    assert not of(nn.Linear(128, 128), rows=2)
    assert not of(nn.Linear(128, 8))  # not worth it
    assert not of(nn.ReLU())


def test_pytorch_takes_rewrites_by_name() -> None:
    model, x = nn.Linear(32, 64, bias=False).bfloat16().eval(), torch.randn(1, 32).bfloat16()
    fast = intarsia.compile(model, (x,), engines=PyTorch(rewrites=("vector_products",)))
    (step,) = fast.inlay.steps
    assert isinstance(step.program, GraphProgram) and aten.mv.default in targets(step.program.module)
    torch.testing.assert_close(fast(x), model(x), rtol=2**-7, atol=2**-9)
    with pytest.raises(EngineError, match="there is no rewrite 'nonsense'"):
        intarsia.compile(model, (x,), engines=PyTorch(rewrites=("nonsense",)))


def test_vectors_are_raced_where_there_are_some() -> None:
    model, x = nn.Linear(32, 64, bias=False).bfloat16().eval(), torch.randn(1, 32).bfloat16()
    fast = intarsia.compile(model, (x,), partition=intarsia.Measured(budget_s=2))
    assert "pytorch, vector_products" in {trial.name for trial in fast.plan.findings.trials}
