"""Write a converter: an operator that no engine has becomes layers that every engine takes.

python examples/converter.py
"""

from __future__ import annotations

import torch
from torch import nn

import intarsia
from intarsia.network import functional as F


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.special.spherical_bessel_j0(self.first(x)))


model, x = Net().eval(), torch.randn(8, 16)
options = {"engines": ["onnxruntime"], "min_block_size": 1}
print(intarsia.explain(model, (x,), **options))  # three segments, and the advice to write this converter


# The arguments have the names of the operator's schema. The functionals add layers to the network.
@intarsia.converter(torch.ops.aten.special_spherical_bessel_j0.default)
def spherical_bessel_j0(ctx, x):
    return F.where(F.equal(x, 0.0), 1.0, F.sin(x) / x)


fast = intarsia.compile(model, (x,), **options)  # each piece is compared with PyTorch
print(fast.plan)
assert len(fast.plan) == 1
torch.testing.assert_close(fast(x), model(x))
