"""`intarsia.check`: whether a candidate computes the same as a model, and where it first differs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.build.judge import Answer, Judge, call_of
from intarsia.build.trial import Case
from intarsia.capture.example import Call, copied_call
from intarsia.capture.input import check_call, resolve_call
from intarsia.capture.protect import keeps_random_state
from intarsia.compare import disagreement, relative_error
from intarsia.convert import registry
from intarsia.errors import InputError, IntarsiaError, error_text, first_line, some_of
from intarsia.logs import counted, working
from intarsia.lower.lowered import Lowered, example_inputs
from intarsia.lower.model import lower_model
from intarsia.lower.size_examples import corners
from intarsia.report.first_difference import Candidate, FirstDifference, candidate_of, first_difference


@dataclass(frozen=True)
class Comparison:
    """One call of model and candidate: how the outputs differ, or None, and the largest error."""

    inputs: str
    fault: str | None
    error: float


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. Use `print`, `equal`, `comparisons`, `difference` or `as_dict()`."""

    model: str
    candidate: str
    comparisons: tuple[Comparison, ...]
    difference: FirstDifference | None = None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all outputs agree to rounding, or within the given tolerance."""
        return all(comparison.fault is None for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"equal": self.equal, **asdict(self)}

    def __str__(self) -> str:
        verdict = "computes what the model does, to rounding" if self.equal else "differs from the model"
        lines = [f"{self.candidate} {verdict}"]
        for comparison in self.comparisons:
            outcome = comparison.fault or f"equal, largest error {comparison.error:.1e}"
            lines.append(f"  {comparison.inputs}: {outcome}")
        if self.difference is not None:
            lines += str(self.difference).splitlines()
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


@keeps_random_state
def check(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    candidate: Callable[..., Any] | str | os.PathLike[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    tolerance: float | None = None,
    draws: int = 3,
    edges: bool = True,
    reproduction: str | os.PathLike[str] | None = None,
) -> CheckReport:
    """Compare a candidate with the model that it should compute.

    The candidate is a callable, such as a module of `torch.compile`, or the path of an ONNX file, an OpenVINO
    model, a `.pt2` file or a file of `intarsia.save`. Without a candidate, the model is compiled, and the
    compiled module is checked. Model and candidate run on the example, on `draws` random inputs like it, and
    at the ends of dynamic sizes. With `edges`, they also run at edge values such as zeros, an infinity and
    NaN. Outputs may differ by rounding, or by `tolerance`, relative to the largest value.

    If an output differs, the report names the first node whose value differs, with its source line. This
    needs a candidate whose inner values can be read. The node and its inputs are written to the file
    `reproduction`, as a program of `torch.export`.

    Example:
        >>> import torch, intarsia
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        >>> intarsia.check(model, (x,), lambda x: model(x)).equal
        True
        >>> print(intarsia.check(model, (x,), lambda x: model(x) + 0.1, draws=0, edges=False))
        <lambda> differs from the model
          the example: output 0 is off by 0.1 at ...
        note: the first node that differs is unknown: a plain function shows only its results
    """
    check_call(model, args, kwargs)
    if tolerance is not None and not tolerance > 0:
        raise InputError(f"tolerance={tolerance!r} must be more than 0")
    args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs or {}, dynamic_shapes)
    judge = Judge(model)
    if candidate is None:
        from intarsia.compiler.api import compile

        candidate = compile(model, args, kwargs, dynamic_shapes=dynamic_shapes)  # type: ignore[arg-type]
    job = _Check(judge, (args, kwargs), candidate_of(candidate, judge.model), dynamic_shapes, tolerance)
    return job.run(model, draws, edges, reproduction)


@dataclass(frozen=True)
class _Check:
    """A comparison of a model and a candidate."""

    judge: Judge
    call: Call
    candidate: Candidate
    dynamic_shapes: Any
    tolerance: float | None

    def run(
        self,
        model: nn.Module | ExportedProgram,
        draws: int,
        edges: bool,
        reproduction: str | os.PathLike[str] | None,
    ) -> CheckReport:
        try:
            truth = self.judge.answer(self.call)
        except Exception as error:  # the user's own model
            raise InputError(f"the model fails on its example inputs: {error_text(error)}") from error
        if not self.judge.is_deterministic(self.call, truth):
            raise InputError("two runs of the model differ, so a candidate cannot be compared with it")
        notes: list[str] = []
        with working("exporting and lowering"):
            lowered, reason = self.lowered
        if lowered is None:
            notes.append(f"rounding is estimated, since the model has no graph: {reason}")
        comparisons: list[Comparison] = []
        failed: Call | None = None
        calls = list(self._calls(lowered, draws, edges, notes))
        for name, call in counted(calls, len(calls), "comparing with the model"):
            comparison = self._compare(name, call, lowered, notes)
            if comparison is None:
                continue
            comparisons.append(comparison)
            if comparison.fault is not None and failed is None:
                failed = call
        report = CheckReport(type(model).__name__, self.candidate.name, tuple(comparisons))
        if failed is not None:
            notes += self._other_weights()
            with working("finding the first node that differs"):
                difference = first_difference(self.judge, lowered, failed, self.candidate, reproduction)
            if isinstance(difference, FirstDifference):
                report = replace(report, difference=difference)
            else:
                notes.append(f"the first node that differs is unknown: {difference}")
        return replace(report, notes=tuple(notes))

    def _other_weights(self) -> list[str]:
        """A note if the candidate was compiled with other weights than the model's."""
        compiled = self.candidate.compiled
        candidate = {} if compiled is None else compiled.state_dict()
        model = self.judge.model.state_dict()
        pairs = [(name, weight, model[name]) for name, weight in candidate.items() if name in model]
        names = [name for name, a, b in pairs if a.shape != b.shape or not torch.equal(a, b.to(a))]
        return [f"it was compiled with other weights: {some_of(names)}"] if names else []

    @cached_property
    def lowered(self) -> tuple[Lowered | None, str]:
        """The model's graph, for an estimate of rounding, or None and the reason."""
        try:
            lowered, _ = lower_model(
                self.judge.model,
                *self.call,
                self.dynamic_shapes,
                has_converter=registry.__contains__,
                drop_guards=True,
            )
        except IntarsiaError as error:
            return None, first_line(error)
        return lowered, ""

    def _calls(
        self, lowered: Lowered | None, draws: int, edges: bool, notes: list[str]
    ) -> Iterator[tuple[str, Call]]:
        yield "the example", self.call
        yield from drawn_calls(self.call, draws)
        if lowered is not None:
            inputs = example_inputs(lowered, *self.call)
            for number, corner in enumerate(corners(lowered, inputs, notes)):
                yield f"the {'largest' if number else 'least'} sizes", call_of(lowered, corner)
        if edges:
            yield from edge_calls(self.call)

    def _compare(self, name: str, call: Call, lowered: Lowered | None, notes: list[str]) -> Comparison | None:
        try:
            truth = self.judge.answer(call)
        except Exception as error:  # the model may not take generated inputs
            notes.append(f"not compared on {name}, where the model fails: {type(error).__name__}")
            return None
        try:
            answer = self.judge.answer(call, self.candidate.call)
        except Exception as error:
            return Comparison(name, f"fails where the model does not: {error_text(error)}", 0.0)
        leaves = _like(truth, answer) if self.candidate.flat else answer.leaves
        if len(leaves) != len(truth.leaves):
            return Comparison(name, f"it returns {len(leaves)} results; the model {len(truth.leaves)}", 0.0)
        if not self.candidate.flat and answer.structure != truth.structure:
            structure = f"it returns results as {answer.structure}; the model as {truth.structure}"
            return Comparison(name, structure, 0.0)
        for number, (leaf, expected) in enumerate(zip(leaves, truth.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor) != isinstance(expected, torch.Tensor):
                kinds = f"is a {type(leaf).__name__}; the model returns a {type(expected).__name__}"
                return Comparison(name, f"output {number} {kinds}", 0.0)
        error_of = relative_error(leaves, truth.leaves)
        if not self.candidate.flat and (written := _inputs_fault(answer, truth)) is not None:
            return Comparison(name, written, error_of)
        if self.tolerance is not None:
            return Comparison(name, disagreement(leaves, truth.leaves, tolerance=self.tolerance), error_of)
        if disagreement(leaves, truth.leaves) is None:  # a fast check, before the runs of `_fault`
            return Comparison(name, None, error_of)
        return Comparison(name, self._fault(call, truth, leaves, lowered), error_of)

    def _fault(self, call: Call, truth: Answer, leaves: list[Any], lowered: Lowered | None) -> str | None:
        """How an answer differs by more than rounding, which further runs of the model estimate."""
        if lowered is None or truth.structure != lowered.out_spec:
            return disagreement(leaves, truth.leaves)
        try:
            expected = self.judge.graph_answer(lowered, call)
        except Exception:  # sizes that the graph does not take
            return disagreement(leaves, truth.leaves)
        case = Case(lowered.module, example_inputs(lowered, *copied_call(call)), expected)
        answer = replace(truth, leaves=leaves)
        return self.judge.fault(lowered, truth, answer, case.rounding(0.0))


def _inputs_fault(answer: Answer, truth: Answer) -> str | None:
    """How the arguments differ after the call, or None: the candidate must change them like the model."""
    for number, (left, expected) in enumerate(zip(answer.inputs, truth.inputs, strict=True)):
        if isinstance(expected, torch.Tensor) and (fault := disagreement([left], [expected])) is not None:
            return f"it changes tensor {number} of the call differently: {fault}"
    return None


def _like(truth: Answer, answer: Answer) -> list[Any]:
    """The model's results with the tensors of a file in place of its tensors."""
    tensors = iter([leaf for leaf in answer.leaves if isinstance(leaf, torch.Tensor)])
    leaves = [next(tensors, None) if isinstance(leaf, torch.Tensor) else leaf for leaf in truth.leaves]
    return [*leaves, *tensors]


# Generated calls of a model: random values like those of the example, and edge values.


Fill = Callable[[torch.Tensor], torch.Tensor]


def drawn_calls(call: Call, count: int) -> Iterator[tuple[str, Call]]:
    """Calls with random values: floats with the example's mean and deviation, integers in its range."""
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        yield f"drawn inputs {number}", _filled(call, partial(_drawn, draw=draw))


def edge_calls(call: Call) -> Iterator[tuple[str, Call]]:
    """Calls with edge values: zeros, small and large numbers, one infinity or NaN, the ends of integers."""
    for name, fill in _EDGES.items():
        edge = _filled(call, fill)
        if not _same(edge, call):
            yield name, edge


def _drawn(value: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    if value.numel() == 0:
        return value
    if value.dtype is torch.bool:
        return torch.rand(value.shape, generator=draw) < float(value.float().mean())
    if value.dtype.is_floating_point:
        wide = value.float()
        spread = float(wide.std(correction=0))
        return torch.randn(value.shape, generator=draw) * spread + float(wide.mean())
    if value.dtype.is_complex:
        return value[torch.randperm(len(value), generator=draw)] if value.dim() else value
    return torch.randint(int(value.min()), int(value.max()) + 1, value.shape, generator=draw)


def _one(special: float) -> Fill:
    def fill(value: torch.Tensor) -> torch.Tensor:
        if not value.dtype.is_floating_point or not value.numel():
            return value
        changed = value.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[0] = special
        return changed

    return fill


def _scaled(factor: float) -> Fill:
    return lambda value: value * factor if value.dtype.is_floating_point else value


def _end(largest: bool) -> Fill:
    def fill(value: torch.Tensor) -> torch.Tensor:
        is_integer = not (
            value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool
        )
        if not is_integer or not value.numel():
            return value
        return torch.full_like(value, int(value.max() if largest else value.min()))

    return fill


_EDGES: dict[str, Fill] = {
    "zeros": _scaled(0.0),
    "values 1e-4 times as large": _scaled(1e-4),
    "values 1e4 times as large": _scaled(1e4),
    "an infinity": _one(math.inf),
    "a NaN": _one(math.nan),
    "the least integer everywhere": _end(largest=False),
    "the largest integer everywhere": _end(largest=True),
}


def _filled(call: Call, fill: Fill) -> Call:
    """The call with other values; strides, dtypes and devices stay."""

    def replaced(value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            return value
        return torch.empty_like(value).copy_(fill(value.detach()))

    args, kwargs = pytree.tree_map_only(torch.Tensor, replaced, (tuple(call[0]), dict(call[1])))
    return args, kwargs


def _same(one: Call, other: Call) -> bool:
    def leaves(call: Call) -> list[Any]:
        values = pytree.tree_leaves((tuple(call[0]), dict(call[1])))
        return [value for value in values if isinstance(value, torch.Tensor)]

    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))
