"""How far two answers to one call may lie apart: as far as rounding moves the model's own answer.

The model is run again in float64 and with inputs moved by a few units in the last place. Where those answers
move, an engine's may; where a decision (a comparison, an argmax) flips under them, the element says nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
_NUDGE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_AMPLIFIED = 16.0
Results = tuple[Any, Sequence[Any]]  # what a call returned, and its inputs afterwards


def difference(
    model: torch.nn.Module, given: Sequence[Any], expected: Results, answer: Results
) -> str | None:
    """What is wrong with an answer, in a clause; None where it is as near as rounding allows."""
    theirs, structure = pytree.tree_flatten(list(expected))
    ours, found = pytree.tree_flatten(list(answer))
    if found != structure:
        return f"the answer has the structure {found}, eager's has {structure}"
    others = [run for run in _other_runs(model, given) if run is not None and len(run) == len(theirs)]
    for place, (truth, got) in enumerate(zip(theirs, ours, strict=True)):
        if not isinstance(truth, torch.Tensor):
            if got != truth or type(got) is not type(truth):
                return f"leaf {place} is {got!r}, eager's is {truth!r}"
            continue
        wrong = _wrong(truth, got, [run[place] for run in others])
        if wrong is not None:
            return f"leaf {place}: {wrong}"
    return None


def _wrong(truth: torch.Tensor, got: Any, others: list[torch.Tensor]) -> str | None:
    if not isinstance(got, torch.Tensor) or got.dtype != truth.dtype or got.shape != truth.shape:
        return f"it is {getattr(got, 'dtype', type(got))} {tuple(getattr(got, 'shape', ()))}"
    if not truth.numel():
        return None
    others = [other for other in others if other.shape == truth.shape]
    a, b = got.double(), truth.double()
    steady = torch.ones_like(b, dtype=torch.bool)
    noise = torch.zeros_like(b)
    for other in others:
        c = other.double()
        steady &= torch.isfinite(c) == torch.isfinite(b)
        moved = torch.nan_to_num((c - b).abs(), nan=0.0, posinf=0.0)
        noise = torch.maximum(noise, moved)
        if not truth.is_floating_point():
            steady &= c == b
    special = ~torch.isfinite(b)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if not truth.is_floating_point():
        return _first(steady & ~same, a, b)
    row = noise.amax(dim=-1, keepdim=True).expand_as(noise) if noise.ndim else noise
    allowed = _AMPLIFIED * row + _ROUNDING[_computed_in(truth)] * (1 + b.abs())
    far = torch.where(special | ~torch.isfinite(a), ~same, (a - b).abs() > allowed)
    return _first(steady & far, a, b)


def _computed_in(truth: torch.Tensor) -> torch.dtype:
    """The dtype of a result; of a double whose elements are all float32 numbers, that it was cast from."""
    finite = truth[torch.isfinite(truth)]
    cast = truth.dtype == torch.float64 and torch.equal(finite.float().double(), finite)
    return torch.float32 if cast else truth.dtype


def _first(wrong: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str | None:
    count = int(wrong.sum())
    if not count:
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{count} of {wrong.numel()} elements differ, at {place} {float(a[place])}, eager {float(b[place])}"
    )


def _other_runs(model: torch.nn.Module, given: Sequence[Any]) -> list[list[Any] | None]:
    """The model's own answers in float64, and with its inputs moved a little, three times."""
    generator = torch.Generator().manual_seed(11)
    with _in_float64():
        runs = [_run(copy.deepcopy(model).double(), [_wide(x) for x in _distinct(given)])]
    runs += [_run(copy.deepcopy(model), [_nudged(x, generator) for x in _distinct(given)]) for _ in range(3)]
    return runs


@contextmanager
def _in_float64() -> Iterator[None]:
    """Numbers that a model makes itself are doubles too: `(x > y) + 1e-3` is of the default dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _run(model: torch.nn.Module, inputs: list[Any]) -> list[Any] | None:
    try:
        with torch.no_grad():
            return pytree.tree_leaves([model(*inputs), tuple(inputs)])
    except Exception:  # this run has no answer and so measures nothing
        return None


def _distinct(given: Sequence[Any]) -> list[Any]:
    return [x.clone() for x in given]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _nudged(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return (x.double() * (1 + _NUDGE[x.dtype] * signs)).to(x.dtype)
