"""One random model compiled and compared with itself run eagerly, on several calls.

Two answers to one call may differ as much as rounding moves the model's own answer. The model is run again
in float64, and with inputs moved by a few units in the last place. An engine's answer may move where those
do. An element is not compared where a decision (a comparison, an argmax) flips between those runs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from tests.fuzz.draw import Case
from torch.utils import _pytree as pytree

import intarsia
from intarsia.errors import InputError, IntarsiaError, RefitError, StaleWeightsError
from intarsia.runtime.compiled import Compiled

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
    model, inputs = _Packing(made["Model"](), made["pack"]).eval(), made["inputs"]
    twin = copy.deepcopy(model).train(case.options.training)  # the one that is compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = _compiled(case, twin, inputs(3, 0))
        except IntarsiaError as error:
            return Outcome(Verdict.REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome(Verdict.FAILED, f"compile: {type(error).__name__}: {error}")
        fast = _Packing(compiled, made["pack"])
        outcome = _try_calls(case, model, fast, inputs)
        if case.options.step and not outcome.wrong and not case.program.buffers:
            return _try_step(case, (model, twin), compiled, inputs) or outcome
        return outcome


class _Packing(torch.nn.Module):
    """A model that is called with its inputs one by one, whatever they are given in."""

    def __init__(self, model: torch.nn.Module, pack: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.model, self.pack = model, pack

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*self.pack(*inputs))


def _compiled(case: Case, twin: _Packing, example: tuple[Any, ...]) -> torch.nn.Module:
    options = case.options
    dynamic = None
    if options.dynamic:
        size = torch.export.Dim("n", min=1, max=64)
        dynamic = twin.pack(*(dict.fromkeys(x.dynamic, size) or None for x in case.program.inputs))
    return intarsia.compile(
        twin.model,
        twin.pack(*example),
        dynamic_shapes=dynamic,
        engines=list(options.engines),
        partition=options.partition,
        min_block_size=options.min_block_size,
        rewrite=options.rewrite,
    )


def _try_step(
    case: Case, models: tuple[_Packing, _Packing], compiled: torch.nn.Module, inputs: Any
) -> Outcome | None:
    """A fused optimizer steps on the model: the next call is refused, or answers as the model does then."""
    for one in models:
        parameters = list(one.parameters())
        if not parameters:
            return None
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(parameters, lr=0.1, fused=True).step()
    model, twin = models
    fast = _Packing(compiled, model.pack)
    if isinstance(compiled, Compiled):
        outcome = _try_calls(case, copy.deepcopy(model), fast, inputs, stale_is_fine=True)
        if outcome.wrong:
            return replace(outcome, said=f"after a fused step: {outcome.said}")
        try:
            compiled.refit(twin.model)
        except RefitError:
            return None
    outcome = _try_calls(case, model, fast, inputs, stale_is_fine=not isinstance(compiled, Compiled))
    return replace(outcome, said=f"after a fused step: {outcome.said}") if outcome.wrong else None


def _try_calls(
    case: Case, model: torch.nn.Module, fast: torch.nn.Module, inputs: Any, stale_is_fine: bool = False
) -> Outcome:
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
        except StaleWeightsError as error:
            if stale_is_fine:
                return Outcome(Verdict.REFUSED, str(error))
            return Outcome(Verdict.FAILED, f"{call}: {type(error).__name__}: {error}")
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
        # Of infinity gelu makes NaN in float32 with AVX-512 (torch 2.13), and infinity in float64.
        steady &= (torch.isfinite(c) == torch.isfinite(b)) & (torch.isnan(c) == torch.isnan(b))
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
    """The dtype of a result; of one whose elements are all numbers of a shorter dtype, that it was cast from.

    Whole numbers are of any dtype, and say nothing. ONNX Runtime computes float16 in float32, and takes out
    the casts between.
    """
    finite = truth[torch.isfinite(truth)]
    if torch.equal(finite, finite.round()):
        return torch.float32 if truth.dtype == torch.float64 else truth.dtype
    shorter = {torch.float64: (torch.float16, torch.float32), torch.float32: (torch.float16,)}
    candidates = shorter.get(truth.dtype, ())
    casts = (dtype for dtype in candidates if torch.equal(finite.to(dtype).to(truth), finite))
    return next(casts, truth.dtype)


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
