"""Products of one row in bfloat16 as products with vectors, and which graphs have no others."""

from __future__ import annotations

import pytest
import torch
from tests.engines.rewritten import applied, lowered, targets
from tests.functions import Function
from torch import nn

import intarsia
from intarsia.engines import PyTorch
from intarsia.engines.base import GraphProgram
from intarsia.engines.graph_rewrites import apply_rewrites, has_only_one_row_products
from intarsia.engines.graph_rewrites.convolutions import fold_batch_norms
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
    fast = intarsia.compile(model, (x,), engines=PyTorch(), partition=intarsia.Measured(budget_s=60))
    assert "pytorch, vector_products" in {trial.name for trial in fast.plan.findings.trials}


# Constant factors that leave float32 when they are merged: multiplied one by one, as PyTorch does.


IMAGE, ROWS = (1, 4, 2, 2), (1, 4)


def filled(layer: nn.Module, value: float) -> nn.Module:
    nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]
    return layer


MODELS = {
    "two factors": (Function(lambda x: x * 1e20 * 1e20), ROWS),
    "factors that vanish": (Function(lambda x: x * 1e-25 * 1e-25 * 1e30), ROWS),
    "divisors": (Function(lambda x: x / 1e25 / 1e25), ROWS),
    "with a sum between": (Function(lambda x: (x * 1e20 + 1.0).reshape(4) * 1e20), ROWS),
    "a convolution": (
        Function(lambda m, x: m(x) * 1e20, filled(nn.Conv2d(4, 4, 1, bias=False), 1e20)),
        IMAGE,
    ),
    "before a convolution": (Function(lambda m, x: m(x * 1e20), filled(nn.Conv2d(4, 4, 1), 1e20)), IMAGE),
    "a product": (Function(lambda m, x: m(x) * 1e20, filled(nn.Linear(4, 4, bias=False), 1e20)), ROWS),
    "a product that vanishes": (
        Function(lambda m, x: m(x) * 1e-25, filled(nn.Linear(4, 4, False), 1e-25)),
        ROWS,
    ),
    "a batch norm": (
        nn.Sequential(filled(nn.Conv2d(4, 4, 1, bias=False), 1e20), filled(nn.BatchNorm2d(4), 1e20)),
        IMAGE,
    ),
    "a product by a product": (
        nn.Sequential(filled(nn.Linear(4, 4, bias=False), 1e20), filled(nn.Linear(4, 4, bias=False), 1e20)),
        ROWS,
    ),
}


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_not_merged_out_of_range(name: str, engine: str) -> None:
    model, shape = MODELS[name]
    fast = intarsia.compile(model.eval(), (torch.ones(shape),), engines=[engine], min_block_size=1)
    assert engine in fast.plan.engines, str(fast.plan)  # what can be is on the engine
    for value in (0.0, 1e-30, 1e-18, 1.0, 1e30):
        x = torch.full(shape, value)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=0.0, equal_nan=True)


@pytest.mark.openvino
def test_a_product_by_a_product_stays_whole() -> None:
    """Engines do not multiply weights with each other."""
    model, shape = MODELS["a product by a product"]
    fast = intarsia.compile(model.eval(), (torch.ones(shape),), engines=["openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)


def test_a_batch_norm_that_overflows_halves_is_not_folded() -> None:
    """Of a variance of zero the factor is 316, and 300 times that is beyond float16."""
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.running_var, 0.0)  # type: ignore[arg-type]
    model = nn.Sequential(filled(nn.Conv2d(4, 4, 1, bias=False), 300.0), norm).eval()
    for dtype, count in ((torch.float32, 1), (torch.float16, 0)):
        graph = torch.fx.Graph()
        root = nn.Module()
        conv, held = model[0], model[1]
        for name, value in (
            ("w", conv.weight), ("g", held.weight), ("b", held.bias), ("m", held.running_mean),
            ("v", held.running_var),
        ):  # fmt: skip
            root.register_buffer(name, value.detach().to(dtype))
        x = graph.placeholder("x")
        w, g, b, m, v = (graph.get_attr(name) for name in "wgbmv")
        made = graph.call_function(torch.ops.aten.conv2d.default, (x, w))
        given = (made, g, b, m, v, False, 0.1, 1e-5, True)
        graph.output((graph.call_function(torch.ops.aten.batch_norm.default, given),))
        assert fold_batch_norms(torch.fx.GraphModule(root, graph)) == count


def test_a_weight_of_zeros_merges_with_anything() -> None:
    model = Function(lambda m, x: m(x) * 0.5 * 0.25, filled(nn.Linear(4, 4, bias=False), 0.0)).eval()
    fast = intarsia.compile(model, (torch.ones(ROWS),), engines=["onnxruntime"], min_block_size=1)
    assert fast.plan.engines == ("onnxruntime",)
