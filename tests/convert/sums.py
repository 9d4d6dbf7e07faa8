"""Answers of operators that add up, judged by what adding in any order may make of them.

Terms added in float32, in whichever order, are off by at most n * eps times the sum of their magnitudes, and
where that sum is beyond the largest float an order may overflow on its way. The terms of an element are its
inputs, each times what the element changes with it; for what is made of several sums, as a deviation is, that
is the bound to first order: the answer is the exact one of inputs that are off by n roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

_ROUNDING = torch.finfo(torch.float32).eps  # no engine adds up in less, whatever the dtype of its answer
ADDS_UP = {
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "cdist", "corrcoef", "cov", "dist", "einsum", "inner",
    "linalg.norm", "linalg.vector_norm", "logsumexp", "masked.cumsum", "matmul", "mean", "mm", "mv", "nansum",
    "native_batch_norm", "native_group_norm", "native_layer_norm", "nn.functional.adaptive_avg_pool1d",
    "nn.functional.adaptive_avg_pool3d", "nn.functional.batch_norm", "nn.functional.bilinear",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d",
    "nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d",
    "nn.functional.group_norm", "nn.functional.instance_norm", "nn.functional.interpolate",
    "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.local_response_norm",
    "nn.functional.rms_norm", "nn.functional.scaled_dot_product_attention", "norm", "std", "std_mean",
    "sum", "var", "var_mean",
}  # fmt: skip


def in_any_order(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The results, with eager's element wherever ours is one that adding in some order gives.

    The module is one of float64, and so are its inputs.
    """
    leaves, exact = _differentiable(module, inputs)
    settled = []
    for have, want, truth in zip(results, expected, exact, strict=True):
        made = have.clone()
        if have.is_floating_point() and truth.requires_grad:
            flat, right, true = made.view(-1), want.reshape(-1), truth.reshape(-1)
            unlike = ~torch.isclose(flat, right, rtol=0.0, atol=0.0, equal_nan=True)
            for place in unlike.nonzero()[:, 0].tolist():
                if _some_order(float(flat[place]), float(right[place]), true[place], leaves, have.dtype):
                    flat[place] = right[place]
        settled.append(made)
    return settled


def _differentiable(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
    """The inputs that answers depend on, and the answers."""
    for floats in (list(inputs), list(inputs[:1])):  # running statistics have no derivative
        given = [
            t.clone().requires_grad_(t.is_floating_point() and i < len(floats)) for i, t in enumerate(inputs)
        ]
        try:
            with torch.enable_grad():
                return [t for t in given if t.requires_grad], fx.Interpreter(module).run(*given)
        except RuntimeError as error:
            if "cannot have requires_grad" not in str(error):
                raise
    raise AssertionError("no input has a derivative")


def _some_order(
    have: float, want: float, exact: torch.Tensor, leaves: Sequence[torch.Tensor], dtype: torch.dtype
) -> bool:
    slopes = torch.autograd.grad(exact, leaves, retain_graph=True, allow_unused=True)
    terms = [(s * x).detach().abs().view(-1) for s, x in zip(slopes, leaves, strict=True) if s is not None]
    sizes = torch.cat([torch.zeros(0, dtype=torch.float64), *terms])
    total, count = float(sizes.sum()), int(sizes.count_nonzero())
    finite = abs(have) < float("inf") and abs(want) < float("inf")
    if total > torch.finfo(dtype).max and not finite:
        return True
    return abs(have - float(exact.detach())) <= count * _ROUNDING * total
