"""Write a fusion: a rewriting pattern that replaces several layers by fewer.

python examples/fusion.py
"""

from __future__ import annotations

import torch
from torch import nn

import intarsia
from intarsia.network import functional as F
from intarsia.rewrite import check_pattern, rule


# The pattern is the expression that it matches. The function returns the replacement, or a reason to refuse.
@rule(lambda op, a, b: op.Add(a, op.Neg(b)))
def subtraction(net, a, b):
    return F.sub(a, b)


print(check_pattern(subtraction, trials=20))  # runs random networks before and after the rewrite


class Difference(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + (-b)


model, pair = Difference(), (torch.randn(4), torch.randn(4))
fast = intarsia.compile(model, pair, engines=["onnxruntime"], min_block_size=1, rewrite=[subtraction])
layers = fast.plan.drawing().segments[0].layers
print(layers.converted, layers.rewritten, sep="\nbecomes\n")
assert "Neg(" not in layers.rewritten
torch.testing.assert_close(fast(*pair), model(*pair))
