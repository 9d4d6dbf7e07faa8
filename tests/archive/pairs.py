"""A dataclass that is registered as a pytree, and a model that returns it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Pair:
    once: torch.Tensor
    twice: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="tests.archive.Pair")


class MakesPair(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x + 0, x * 2)
