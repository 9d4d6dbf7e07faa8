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

_STEP = 2.0**-20
_ROUNDING = torch.finfo(torch.float32).eps  # no engine adds up in less, whatever the dtype of its answer
ADDS_UP = {
    "__rmatmul__", "_native_batch_norm_legit", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "cdist",
    "corrcoef", "cov", "dist", "einsum", "inner",
    "linalg.norm", "linalg.vector_norm", "logsumexp", "masked.cumsum", "masked.mean", "masked.sum", "matmul",
    "mean", "mm", "mv", "nansum",
    "native_batch_norm", "native_group_norm", "native_layer_norm", "nn.functional.adaptive_avg_pool1d",
    "nn.functional.adaptive_avg_pool3d", "nn.functional.avg_pool2d",
    "nn.functional.batch_norm", "nn.functional.bilinear",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d",
    "nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d",
    "nn.functional.embedding_bag",
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
    exact, totals, counts = _terms(module, inputs)
    settled = []
    for have, want, truth, total, count in zip(results, expected, exact, totals, counts, strict=True):
        if have.is_floating_point():
            right = (have.double() - truth).abs() <= count * _ROUNDING * total
            overflows = ~have.isfinite() | ~want.isfinite()
            right |= overflows & (total > torch.finfo(have.dtype).max)
            have = torch.where(right, want, have)
        settled.append(have)
    return settled


def _terms(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The exact answers, and for each element the sum of the magnitudes of its terms and their number.

    A term is seen by moving one element of an input: some operators have no derivative by all of theirs.
    """

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [t.clone() for t in fx.Interpreter(module).run(*(t.clone() for t in given))]

    given = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
    exact = run()
    totals = [torch.zeros_like(t, dtype=torch.float64) for t in exact]
    counts = [torch.zeros_like(t, dtype=torch.float64) for t in exact]
    for flat in (t.view(-1) for t in given if t.is_floating_point()):
        for place in flat.nonzero()[:, 0].tolist():
            value = flat[place].clone()
            flat[place] = value * (1 + _STEP)
            for made, truth, total, count in zip(run(), exact, totals, counts, strict=True):
                term = (made - truth).abs() / _STEP
                total += term
                count += term != 0
            flat[place] = value
    return exact, totals, counts
