"""Inputs that require gradients: a compiled module computes none, and says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import DifferenceWarning


class _Features(nn.Module):
    """A network for a perceptual loss, such as a frozen VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y if scale is None else y * scale


class _Branching(_Features):
    """It is compiled in parts, since it decides on data."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, scale) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("model", [_Features, _Branching])
@pytest.mark.parametrize("engines", ["onnxruntime", None], ids=["onnxruntime", "default"])
def test_an_input_that_requires_gradients_is_a_warning(model: type[nn.Module], engines: str | None) -> None:
    """Before, a loss that added the distance of features to another term trained the other term alone."""
    x = torch.randn(4, 8)
    fast = intarsia.compile(model().eval(), (x,), engines=engines, min_block_size=1)
    image = x.clone().requires_grad_()
    with pytest.warns(DifferenceWarning, match="requires gradients") as told:
        result = fast(image)
    assert not result.requires_grad
    assert told[0].filename == __file__
    with pytest.warns(DifferenceWarning, match="requires gradients"):
        fast(image * 2)


def test_an_input_by_name_and_one_in_a_list_are_noticed() -> None:
    class Sum(nn.Module):
        def forward(self, pair: list[torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
            return (pair[0] + pair[1]) * scale

    a, b = torch.randn(3), torch.randn(3)
    fast = intarsia.compile(Sum().eval(), ([a, b],), {"scale": a})
    for pair, scale in (([a, b.clone().requires_grad_()], a), ([a, b], a.clone().requires_grad_())):
        with pytest.warns(DifferenceWarning, match="requires gradients"):
            fast(pair, scale=scale)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_said(off: Any) -> None:
    x = torch.randn(4, 8)
    fast = intarsia.compile(_Features().eval(), (x,), engines="onnxruntime", min_block_size=1)
    with warnings.catch_warnings(), off():
        warnings.simplefilter("error")
        fast(x.clone().requires_grad_())
    with warnings.catch_warnings():  # with gradients on, and inputs that ask for none
        warnings.simplefilter("error")
        fast(x)
        fast(nn.Parameter(x, requires_grad=False))
