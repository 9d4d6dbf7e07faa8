"""Constant factors that leave float32 when they are merged: multiplied one by one, as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia
from intarsia.engines.graph_rewrites.convolutions import fold_batch_norms

IMAGE, ROWS = (1, 4, 2, 2), (1, 4)


class Of(nn.Module):
    """A function of an input, and of layers."""

    def __init__(self, call: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(*self.layers, x)


def filled(layer: nn.Module, value: float) -> nn.Module:
    nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]
    return layer


MODELS = {
    "two factors": (Of(lambda x: x * 1e20 * 1e20), ROWS),
    "factors that vanish": (Of(lambda x: x * 1e-25 * 1e-25 * 1e30), ROWS),
    "divisors": (Of(lambda x: x / 1e25 / 1e25), ROWS),
    "with a sum between": (Of(lambda x: (x * 1e20 + 1.0).reshape(4) * 1e20), ROWS),
    "a convolution": (Of(lambda m, x: m(x) * 1e20, filled(nn.Conv2d(4, 4, 1, bias=False), 1e20)), IMAGE),
    "before a convolution": (Of(lambda m, x: m(x * 1e20), filled(nn.Conv2d(4, 4, 1), 1e20)), IMAGE),
    "a product": (Of(lambda m, x: m(x) * 1e20, filled(nn.Linear(4, 4, bias=False), 1e20)), ROWS),
    "a product that vanishes": (Of(lambda m, x: m(x) * 1e-25, filled(nn.Linear(4, 4, False), 1e-25)), ROWS),
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
    model = Of(lambda m, x: m(x) * 0.5 * 0.25, filled(nn.Linear(4, 4, bias=False), 0.0)).eval()
    fast = intarsia.compile(model, (torch.ones(ROWS),), engines=["onnxruntime"], min_block_size=1)
    assert fast.plan.engines == ("onnxruntime",)
