"""Whether an answer agrees with PyTorch's, element by element, within what rounding can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

ROUNDINGS = 4  # an element may always be off by so many of its own roundings
MARGIN = 16  # and by so many times what rounding was seen to do to it and to values like it
SAMPLES = (1, 8)  # runs to see that in; more than one only where one would condemn
_UNKNOWN = 64  # without such runs: values like it are taken to carry so many roundings each
_SPECIAL = "has NaN or infinity where PyTorch has not, or the reverse"
_GAP = 10  # octaves without a value between values that are not alike


class Spread(Protocol):
    """What rounding does to each output; see `rounding.Rounding`."""

    def spread(self, samples: int) -> Sequence[torch.Tensor | None]: ...


def disagreement(
    answers: Sequence[Any], expected: Sequence[Any], rounding: Spread | None = None
) -> str | None:
    """What is wrong with an answer, in a clause; None if it agrees.

    Integers and booleans must be equal, except where rounding flips PyTorch's own. A float may be off by some
    times what rounding does to it, or to values of its magnitude: a masked logit of -1e9 excuses no other.

    >>> truth = torch.tensor([-1e9, 0.04, 0.03])
    >>> disagreement([torch.tensor([-1e9, 1.0, 0.03])], [truth])
    'output 0 is off by 0.96 at (1,): 1 where PyTorch makes 0.04'
    """
    if len(answers) != len(expected):
        return f"it gives {len(answers)} results; PyTorch gives {len(expected)}"
    for index, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        if not isinstance(truth, torch.Tensor):
            if isinstance(answer, torch.Tensor) or answer != truth:
                return f"output {index} is {answer!r}; PyTorch makes {truth!r}"
            continue
        wrong = _wrong(answer, truth, rounding, index)
        if wrong is not None:
            return f"output {index} {wrong}"
    return None


def _wrong(answer: Any, truth: torch.Tensor, rounding: Spread | None, index: int) -> str | None:
    if not isinstance(answer, torch.Tensor):
        return f"is a {type(answer).__name__}; PyTorch makes a tensor"
    if answer.dtype != truth.dtype or answer.shape != truth.shape:
        return f"is {answer.dtype} {tuple(answer.shape)}; PyTorch makes {truth.dtype} {tuple(truth.shape)}"
    if answer.device != truth.device:
        return f"is on {answer.device}; PyTorch has it on {truth.device}"
    if truth.numel() == 0:
        return None
    if truth.is_complex():
        answer, truth = torch.view_as_real(answer.resolve_conj()), torch.view_as_real(truth.resolve_conj())
    if not truth.is_floating_point():
        return _unequal(answer, truth, rounding, index)
    a, b = answer.detach().double(), truth.detach().double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return _SPECIAL
    if not bool(finite.all()):
        if not _same_specials(a[~finite], b[~finite]):
            return _SPECIAL
        a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    limits = torch.finfo(truth.dtype)
    error, size = (a - b).abs_(), b.abs()
    allowed = (size * (ROUNDINGS * limits.eps)).add_(limits.tiny)
    if bool((error <= allowed).all()):
        return None
    groups = _alike(b)
    for samples in SAMPLES if rounding is not None else (0,):
        noise = rounding.spread(samples)[index] if rounding is not None else None
        seen = size * (_UNKNOWN / MARGIN * limits.eps) if noise is None else noise
        excess = error - torch.maximum(seen, _typical(seen, groups)).mul_(MARGIN).add_(allowed)
        if bool((excess <= 0).all()):
            return None
    place = int(excess.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), excess.shape))
    off, made, right = (float(t.flatten()[place]) for t in (error, a, b))
    return f"is off by {off:.3g} at {where}: {made:.6g} where PyTorch makes {right:.6g}"


def _unequal(answer: torch.Tensor, truth: torch.Tensor, rounding: Spread | None, index: int) -> str | None:
    wrong = answer != truth
    for samples in SAMPLES if rounding is not None and bool(wrong.any()) else ():
        assert rounding is not None
        flips = rounding.spread(samples)[index]
        if flips is not None and bool((flips[wrong] > 0).all()):
            return None
    count = int(wrong.sum())
    return f"differs from PyTorch in {count} of {truth.numel()} elements" if count else None


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7.5), torch.nan_to_num(b, nan=7.5))


def _alike(values: torch.Tensor) -> torch.Tensor | None:
    """A number for each element; equal for elements whose magnitudes have no wide gap between them.

    None where all of them are alike. Logits are millions: exponents are counted, not sorted.
    """
    exponents = torch.frexp(values)[1]
    least = exponents.min()
    exponents -= least
    counts = torch.bincount(exponents.flatten())
    is_zero = values == 0
    if bool(is_zero.any()):  # said to have the exponent 0
        counts[-int(least)] -= is_zero.sum()
    used = counts.nonzero().flatten()
    starts = torch.cat([used.new_zeros(1), (used.diff() > _GAP).long().cumsum(0)])
    if not bool(starts[-1]):
        return None
    table = torch.zeros_like(counts).scatter_(0, used, starts)
    return table[exponents].masked_fill_(is_zero, 0)  # a zero goes with the smallest values there are


def _typical(noise: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    """The root mean square of the noise over values that are alike: one element may be lucky, all are not."""
    if groups is None:
        return noise.square().mean().sqrt()
    flat = groups.flatten()
    squares = torch.bincount(flat, noise.flatten().square())
    return (squares / torch.bincount(flat).clamp(min=1)).sqrt()[groups]


def relative_error(answer: object, truth: object) -> float:
    """The largest difference between two results (any nesting), as a share of the largest value."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(answer), pytree.tree_leaves(truth), strict=True):
        if not isinstance(b, torch.Tensor) or b.numel() == 0:
            continue
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        x, y = a.detach().double(), b.detach().double()
        both = torch.isfinite(x) & torch.isfinite(y)
        if not torch.equal(torch.isfinite(x), torch.isfinite(y)) or not _same_specials(x[~both], y[~both]):
            return float("inf")
        if bool(both.any()):
            worst = max(worst, float((x[both] - y[both]).abs().max() / y[both].abs().max().clamp(min=1e-30)))
    return worst


def beyond_tolerance(answers: Sequence[Any], expected: Sequence[Any], tolerance: float) -> str | None:
    """How an answer in shorter arithmetic is off by more than allowed, in a clause; None where it is not.

    The largest error of an output, as a share of its largest value, may be `tolerance`; whole numbers,
    booleans, NaN and infinities must be PyTorch's.

    >>> truth = [torch.tensor([1.0, -2.0])]
    >>> beyond_tolerance([torch.tensor([1.0, -1.9])], truth, 0.02)
    'output 0 is off by 0.05 of its largest value, and tolerance=0.02'
    """
    if len(answers) != len(expected):
        return f"it gives {len(answers)} results; PyTorch gives {len(expected)}"
    for index, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        inexact = isinstance(truth, torch.Tensor) and (truth.is_floating_point() or truth.is_complex())
        same_kind = isinstance(answer, torch.Tensor) and inexact
        if not same_kind or answer.dtype != truth.dtype or answer.shape != truth.shape:
            wrong = disagreement([answer], [truth])
            if wrong is not None:
                return wrong.replace("output 0", f"output {index}", 1)
            continue
        error = relative_error(answer, truth)
        if error > tolerance:
            return f"output {index} is off by {error:.2g} of its largest value, and tolerance={tolerance:g}"
    return None
