"""Activations."""

from __future__ import annotations

import torch

from intarsia.convert.context import ConversionContext
from intarsia.convert.registry import converter
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten


@converter(aten.relu.default)
def relu(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.relu(self)


@converter(aten.gelu.default)
def gelu(ctx: ConversionContext, self: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(self, approximate=approximate)


@converter(aten.silu.default)
def silu(ctx: ConversionContext, self: Tensor) -> Tensor:
    return F.silu(self)


@converter(aten.leaky_relu.default)
def leaky_relu(ctx: ConversionContext, self: Tensor, negative_slope: float = 0.01) -> Tensor:
    return F.leaky_relu(self, negative_slope)
