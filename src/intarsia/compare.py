"""Whether an engine's answer agrees with PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

# Largest difference allowed, as a share of the largest value: far above rounding, far below a mistake.
_SHARE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def disagreement(answers: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """What is wrong with an answer, in a clause; None if it agrees."""
    for index, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        if answer.dtype != truth.dtype or answer.shape != truth.shape:
            return (
                f"output {index} is {answer.dtype} {tuple(answer.shape)};"
                f" PyTorch makes {truth.dtype} {tuple(truth.shape)}"
            )
        if truth.numel() == 0:
            continue
        share = _SHARE.get(truth.dtype)
        if share is None:
            wrong = int((answer != truth).sum())
            if wrong:
                return f"output {index} differs from PyTorch in {wrong} of {truth.numel()} elements"
            continue
        a, b = answer.double(), truth.double()
        finite = torch.isfinite(b)
        same_special = torch.equal(
            torch.nan_to_num(a[~finite], nan=7.5), torch.nan_to_num(b[~finite], nan=7.5)
        )
        if not same_special or not bool(torch.isfinite(a[finite]).all()):
            return f"output {index} has NaN or infinity where PyTorch has not, or the reverse"
        if not bool(finite.any()):
            continue
        # Masks hold the dtype's smallest number; it must not set the scale for everything else.
        scale = float(b[finite].abs().clamp(max=1e30).max())
        error = float((a[finite] - b[finite]).abs().max())
        if error > share * max(scale, 1e-6):
            return f"output {index} is off by {error:.3g} where values reach {scale:.3g}"
    return None


def relative_error(answer: object, truth: object) -> float:
    """The largest difference between two results (any nesting), as a share of the largest value."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(answer), pytree.tree_leaves(truth), strict=True):
        if not isinstance(b, torch.Tensor) or b.numel() == 0:
            continue
        x, y = a.double(), b.double()
        both = torch.isfinite(x) & torch.isfinite(y)
        if not torch.equal(torch.isfinite(x), torch.isfinite(y)):
            return float("inf")
        if bool(both.any()):
            worst = max(worst, float((x[both] - y[both]).abs().max() / y[both].abs().max().clamp(min=1e-30)))
    return worst
