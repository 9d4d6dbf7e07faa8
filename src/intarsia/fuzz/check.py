"""One random model compiled and compared with itself run eagerly, on several calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from intarsia.compiler import compile
from intarsia.errors import InputError, IntarsiaError
from intarsia.fuzz.draw import Case
from intarsia.fuzz.tolerance import difference

_SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0)


class Verdict(Enum):
    """What came of a trial."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The verdict, and the reason, difference or error in words."""

    verdict: Verdict
    said: str = ""

    @property
    def wrong(self) -> bool:
        """Whether this is a defect."""
        return self.verdict in (Verdict.DIFFERENT, Verdict.FAILED)


@dataclass(frozen=True)
class Trial:
    """A call to try: the varying size, the seed of its values, and whether special values are among them."""

    n: int
    seed: int
    special: bool = False


_STATIC_CALLS = (Trial(3, 0), Trial(3, 1), Trial(3, 2, special=True), Trial(3, 3))
_DYNAMIC_CALLS = (Trial(3, 0), Trial(5, 1), Trial(2, 2), Trial(1, 3), Trial(4, 4, special=True))


def check(case: Case) -> Outcome:
    """Compile a random model and try it on several calls, the first of them the example."""
    made = case.program.namespace()
    model, inputs = made["Model"]().eval(), made["inputs"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fast = _compiled(case, copy.deepcopy(model), inputs(3, 0))
        except IntarsiaError as error:
            return Outcome(Verdict.REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome(Verdict.FAILED, f"compile: {type(error).__name__}: {error}")
        return _try_calls(case, model, fast, inputs)


def _compiled(case: Case, model: torch.nn.Module, example: tuple[Any, ...]) -> torch.nn.Module:
    options = case.options
    dynamic = None
    if options.dynamic:
        size = torch.export.Dim("n", min=1, max=64)
        dynamic = tuple(dict.fromkeys(x.dynamic, size) or None for x in case.program.inputs)
    return compile(
        model,
        example,
        dynamic_shapes=dynamic,
        engines=list(options.engines),
        partition=options.partition,
        min_block_size=options.min_block_size,
        rewrite=options.rewrite,
    )


def _try_calls(case: Case, model: torch.nn.Module, fast: torch.nn.Module, inputs: Any) -> Outcome:
    refused = ""
    for call in _DYNAMIC_CALLS if case.options.dynamic else _STATIC_CALLS:
        given = _special(inputs(call.n, call.seed), call) if call.special else inputs(call.n, call.seed)
        before = copy.deepcopy(model)  # the state this call starts from, for the runs that measure rounding
        theirs = _clone(given)
        try:
            with torch.no_grad():
                expected = model(*theirs)
        except Exception:
            continue  # eager has no answer: nothing to compare
        ours = _clone(given)
        try:
            with torch.no_grad():
                answer = fast(*ours)
        except InputError as error:
            refused = str(error)
            model = before
            continue
        except Exception as error:
            return Outcome(Verdict.FAILED, f"{call}: {type(error).__name__}: {error}")
        wrong = difference(before, given, (expected, theirs), (answer, ours))
        if wrong is not None:
            return Outcome(Verdict.DIFFERENT, f"{call}: {wrong}")
    return Outcome(Verdict.REFUSED, refused) if refused else Outcome(Verdict.EQUAL)


def _clone(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same values in other memory; a tensor given twice stays one tensor."""
    made: dict[int, torch.Tensor] = {}
    return tuple(made.setdefault(id(x), _copy(x)) for x in inputs)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _special(inputs: Sequence[torch.Tensor], call: Trial) -> tuple[torch.Tensor, ...]:
    """The inputs with special values put among the floating-point ones."""
    generator = torch.Generator().manual_seed(call.seed)
    made: dict[int, torch.Tensor] = {}
    for x in inputs:
        if id(x) in made or not x.is_floating_point():
            made.setdefault(id(x), x)
            continue
        values = torch.tensor(_SPECIALS)[torch.randint(0, len(_SPECIALS), x.shape, generator=generator)]
        where = torch.rand(x.shape, generator=generator) < 0.2
        made[id(x)] = _copy(x).copy_(torch.where(where, values.to(x.dtype), x))
    return tuple(made[id(x)] for x in inputs)
