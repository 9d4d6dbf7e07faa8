"""Comparison of an answer with PyTorch's, elementwise, within the effect of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from intarsia.plain_tensors import is_traceable_subclass, plain_tensors, slices_of

if TYPE_CHECKING:
    from intarsia.rounding import Rounding

ROUNDINGS = 4  # an element may always differ by this many roundings of its dtype
# Values of one magnitude may differ by this many roundings of float32 (or float64) each: the largest
# difference among six million logits of GPT-2 is 79 on OpenVINO. Most answers are accepted by this, without a
# run in float64.
_ALIKE = 128
MULTIPLE = 4  # or by this many times the error of PyTorch's own answer
FURTHER_RUNS = (0, 1, 8)  # more runs to measure rounding, only if fewer would reject an answer
_LEAST_ROW = 1e-6  # of the largest value of a result: the smallest scale of a row
_SPECIAL = "has NaN or infinity where PyTorch has not, or the reverse"
_GAP = 10  # octaves without a value between groups of magnitudes
_EXPONENTS = 1 << 11  # of a double


def disagreement(
    answers: Sequence[Any],
    expected: Sequence[Any],
    rounding: Rounding | None = None,
    tolerance: float | None = None,
    rows: int = 1,
) -> str | None:
    """How an answer differs from PyTorch's, in a clause; None if it agrees.

    Integers and booleans must be equal, except where rounding changes PyTorch's own. A float may differ by a
    multiple of the error that rounding causes in PyTorch's own answer, in this element or in values of its
    magnitude: a masked logit of -1e9 excuses no other value. With a `tolerance`, a result may also differ by
    that share of its largest value, in each of its `rows`.

    >>> truth = torch.tensor([-1e9, 0.04, 0.03])
    >>> disagreement([torch.tensor([-1e9, 1.0, 0.03])], [truth])
    'output 0 is off by 0.96 at (1,): 1 where PyTorch makes 0.04'
    >>> disagreement([truth * 1.1], [truth], tolerance=0.02)
    'output 0 is off by 0.1 of its largest value, and tolerance=0.02'
    """
    if len(answers) != len(expected):
        return f"it gives {len(answers)} results; PyTorch gives {len(expected)}"
    for index, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        if not isinstance(truth, torch.Tensor):
            if isinstance(answer, torch.Tensor) or answer != truth:
                return f"output {index} is {answer!r}; PyTorch makes {truth!r}"
            continue
        error = None if tolerance is None else _error_of_floats(answer, truth, rows)
        if error is not None and error <= tolerance:  # type: ignore[operator]
            continue
        wrong = _wrong(answer, truth, rounding, index)
        if wrong is not None and error is not None:
            wrong = f"is off by {error:.2g} of its largest value, and tolerance={tolerance:g}"
        if wrong is not None:
            return f"output {index} {wrong}"
    return None


def _error_of_floats(answer: Any, truth: torch.Tensor, rows: int) -> float | None:
    """The relative error of a result; None if a tolerance does not apply to it."""
    if not isinstance(answer, torch.Tensor) or not (truth.is_floating_point() or truth.is_complex()):
        return None
    if answer.dtype != truth.dtype or answer.shape != truth.shape or truth.layout is not torch.strided:
        return None
    return relative_error(answer, truth, rows)


def _wrong(answer: Any, truth: torch.Tensor, rounding: Rounding | None, index: int) -> str | None:
    if not isinstance(answer, torch.Tensor):
        return f"is a {type(answer).__name__}; PyTorch makes a tensor"
    if truth.is_nested or is_traceable_subclass(truth):  # the sizes of jagged tensors are never equal
        if type(answer) is not type(truth):
            return f"is a {type(answer).__name__}; PyTorch makes a {type(truth).__name__}"
        return disagreement(plain_tensors(answer), plain_tensors(truth))
    if answer.dtype != truth.dtype or answer.shape != truth.shape:
        return f"is {answer.dtype} {tuple(answer.shape)}; PyTorch makes {truth.dtype} {tuple(truth.shape)}"
    if answer.device != truth.device:
        return f"is on {answer.device}; PyTorch has it on {truth.device}"
    if truth.numel() == 0:
        return None
    if truth.layout is not torch.strided:
        if answer.layout != truth.layout:
            return f"has the layout {answer.layout}; PyTorch makes {truth.layout}"
        answer, truth, rounding = answer.to_dense(), truth.to_dense(), None
    if truth.is_complex():
        answer, truth = torch.view_as_real(answer.resolve_conj()), torch.view_as_real(truth.resolve_conj())
    if not truth.is_floating_point():
        return _unequal(answer, truth, rounding, index)
    limits = torch.finfo(truth.dtype)
    exact, special = True, False
    for answered, right in slices_of(answer, truth):
        pair = _finite(answered, right)
        if pair is None:
            return _SPECIAL
        a, b = pair
        special = special or len(b) < len(right)
        exact = exact and bool(((a - b).abs_() <= _roundings(b.abs(), limits)).all())
    if exact:
        return None
    answer, truth = answer.detach(), truth.detach()
    if special:  # in float64, since short floats do not have this operator
        answer, truth = (torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for x in (answer, truth))
    alike = _Alike(truth)
    place = _worst(answer, truth, None, alike, limits)
    if place is None:
        return None
    for further in FURTHER_RUNS:
        change = None if rounding is None else rounding.change(index, further)
        if rounding is None or change is None:
            break
        allowed = change.mul_(MULTIPLE).add_(truth.double().abs().mul_(_share(limits)))
        place = _worst(answer, truth, allowed, alike, limits)
        if place is None or (not further and _no_worse((answer, truth), allowed, alike, rounding, index)):
            return None
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), truth.shape))
    ours, theirs = float(answer[where]), float(truth[where])
    return f"is off by {abs(ours - theirs):.3g} at {where}: {ours:.6g} where PyTorch makes {theirs:.6g}"


def _share(limits: torch.finfo) -> float:
    """The share of their magnitude by which values may always differ."""
    # PyTorch sums short floats in float32 and rounds once, so more terms allow no larger error.
    return max(ROUNDINGS * limits.eps, _ALIKE * min(limits.eps, torch.finfo(torch.float32).eps))


def _roundings(size: torch.Tensor, limits: torch.finfo) -> torch.Tensor:
    """The difference that is always allowed for elements of these sizes."""
    return (size * (ROUNDINGS * limits.eps)).add_(limits.tiny)


def _worst(
    answer: torch.Tensor,
    truth: torch.Tensor,
    noise: torch.Tensor | None,
    alike: _Alike,
    limits: torch.finfo,
) -> int | None:
    """The place of the element that exceeds its allowed difference most; None if none does.

    Without `noise`, a share of each magnitude is allowed.
    """
    typical = alike.typical(truth, _share(limits)) if noise is None else alike.typical(noise)
    worst, place, start = 0.0, None, 0
    for answered, right, *noises in slices_of(answer, truth, *([] if noise is None else [noise])):
        b = right.double()
        seen = noises[0] if noises else b.abs().mul_(_share(limits))
        allowed = torch.maximum(seen, alike.of(typical, b)).add_(_roundings(b.abs(), limits))
        excess = (answered.double() - b).abs_().sub_(allowed)
        if not float(most := excess.max()) <= worst:  # also for NaN
            worst, place = float(most), start + int(excess.argmax())
        start += len(b)
    return place


def _no_worse(
    answers: Sequence[torch.Tensor], allowed: torch.Tensor, alike: _Alike, noise: Rounding, index: int
) -> bool:
    """Whether answers are as near to float64 as allowed, although they differ at other elements.

    They are if their largest error is allowed, and their typical one. For example, `F.interpolate` has its
    largest errors where neighbours differ most, and steps change at other values.
    """
    typical, largest = alike.typical(allowed), alike.largest(allowed)
    for each in answers:
        error = noise.error(index, each)
        if error is None:
            return False
        if bool((alike.typical(error) > typical).any()) or bool((alike.largest(error) > largest).any()):
            return False
    return True


def _unequal(answer: torch.Tensor, truth: torch.Tensor, rounding: Rounding | None, index: int) -> str | None:
    wrong = answer != truth
    for further in FURTHER_RUNS if rounding is not None and bool(wrong.any()) else ():
        flips = rounding.change(index, further)  # type: ignore[union-attr]
        if flips is not None and bool((flips[wrong] > 0).all()):
            return None
    count = int(wrong.sum())
    return f"differs from PyTorch in {count} of {truth.numel()} elements" if count else None


def _finite(answer: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The finite elements of both in float64; None if they differ in a NaN or an infinity."""
    a, b = answer.double(), right.double()
    if bool(torch.isfinite(a.sum() + b.sum())):  # any element that is not finite makes the sum so
        return a, b
    finite = torch.isfinite(b)
    specials = (torch.nan_to_num(x[~finite], nan=7.5) for x in (a, b))
    if not torch.equal(torch.isfinite(a), finite) or not torch.equal(*specials):
        return None
    return a[finite], b[finite]


class _Alike:
    """Groups of elements of a tensor whose magnitudes have no wide gap between them.

    There may be millions of logits, so exponents are counted and not sorted, and nothing is as large as they
    are.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        counts = torch.zeros(_EXPONENTS, dtype=torch.long, device=values.device)
        zeros = torch.zeros_like(counts[0])
        for (part,) in slices_of(values):
            numbers = part.double()
            counts += torch.bincount(_exponents(numbers), minlength=len(counts))
            zeros += (numbers == 0).sum()
        present = counts.clone()
        present[0] -= zeros  # which belong to the group of the smallest values
        used = present.nonzero().flatten()
        starts = (used.diff(prepend=used[:1]) > _GAP).long().cumsum(0)
        self._group = torch.zeros_like(counts).scatter_(0, used, starts)
        self._several = bool(self._group.any())

    def typical(self, noise: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """The root mean square of the noise, times `share`, in each group."""
        if not self._several:
            squared = [seen.double().mul(share).square_().sum() for (seen,) in slices_of(noise)]
            return (torch.stack(squared).sum() / noise.numel()).sqrt_()
        squares = torch.zeros(len(self._group), dtype=torch.double, device=noise.device)
        counts = torch.zeros_like(squares)
        for part, seen in slices_of(self._values, noise):
            groups = self._groups(part.double())
            squares += torch.bincount(groups, seen.double().mul(share).square_(), len(squares))
            counts += torch.bincount(groups, minlength=len(squares))
        return (squares / counts.clamp_(min=1)).sqrt_()

    def largest(self, noise: torch.Tensor) -> torch.Tensor:
        """The largest noise of each group."""
        if not self._several:
            return noise.max()
        most = torch.zeros(len(self._group), dtype=torch.double, device=noise.device)
        for part, seen in slices_of(self._values, noise):
            most.scatter_reduce_(0, self._groups(part.double()), seen, "amax")
        return most

    def of(self, typical: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The typical noise of the group of each value."""
        return typical[self._groups(values)] if self._several else typical

    def _groups(self, values: torch.Tensor) -> torch.Tensor:
        return self._group[_exponents(values)]


def _exponents(values: torch.Tensor) -> torch.Tensor:
    """The exponent bits of each double, which are 0 for zero."""
    return values.view(torch.int64).bitwise_right_shift(52).bitwise_and_(_EXPONENTS - 1)


def relative_error(answer: object, truth: object, rows: int = 1) -> float:
    """The largest difference between two results (any nesting), as a share of the largest value.

    If results have this many rows, each row is measured by itself, so a row of large values excuses no other.

    >>> truth = torch.tensor([[1000.0, 0.0], [1.0, 2.0]])
    >>> relative_error(truth + 1, truth), relative_error(truth + 1, truth, rows=2)
    (0.001, 0.5)
    """
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(answer), pytree.tree_leaves(truth), strict=True):
        if not isinstance(b, torch.Tensor) or b.numel() == 0:
            continue
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if a.shape != b.shape:
            return float("inf")
        has_rows = rows > 1 and b.ndim > 1 and len(b) == rows
        pairs = [_error_and_size(*pair) for pair in (zip(a, b, strict=True) if has_rows else [(a, b)])]
        # Rows of zeros, such as padding, get a scale from the other rows.
        least = max(1e-30, _LEAST_ROW * max(size for _, size in pairs))
        worst = max(worst, *(error / max(size, least) for error, size in pairs))
    return worst


def _error_and_size(answer: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest value of finite elements; infinity if others differ."""
    error = size = 0.0
    for answered, right in slices_of(answer, truth):
        pair = _finite(answered, right)
        if pair is None:
            return float("inf"), 0.0
        if len(pair[1]):
            error = max(error, float((pair[0] - pair[1]).abs_().max()))
            size = max(size, float(pair[1].abs().max()))
    return error, size
