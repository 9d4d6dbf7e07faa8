"""A lowered graph that answers as the model does: tried on every example, mended where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.build.judge import Answer, Call, Judge, call_of
from intarsia.build.trial import Case
from intarsia.capture.example import copied_call
from intarsia.compare import beyond_tolerance, relative_error
from intarsia.errors import InputError
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered
from intarsia.lower.decompositions import decomposition_table, keeping_whole
from intarsia.lower.lowered import example_inputs
from intarsia.lower.range_ends import corners
from intarsia.partition.table import PYTORCH
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.input_checks import check_inputs, checks_of

Lower = Callable[[], tuple[Lowered, Call]]
_MOST_SUSPECTS = 12


@dataclass(frozen=True)
class Example:
    """A call, what the graph is fed for it, and what the model answers; None where the model draws lots.

    `case` has the graph's own answer, once it has been asked for.
    """

    call: Call
    inputs: list[Any]
    truth: Answer | None = None
    case: Case | None = None

    @property
    def elements(self) -> int:
        return sum(value.numel() for value in self.inputs if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Faithful:
    """A graph, the examples it was tried on, and how it still differs from the model, if it does."""

    lowered: Lowered
    examples: list[Example]
    fault: str | None = None


def faithful_lowering(
    judge: Judge,
    made: tuple[Lowered, Call],
    lower: Lower,
    operators: Callable[[], set[Any]],
    given: Call,
    truth: Answer | None,
    notes: list[str],
) -> Faithful:
    """Lower a model so that the graph answers as the model does.

    It was `made` once, as usual. Where that graph does not, decompositions are left out, one by one and then
    all; `operators` names those of the model. A fault that stays is told, and the graph must not be used.
    """
    told: list[str] = []
    first = _tried(judge, lambda: made, given, truth, told)
    if first.fault is None:
        notes += told
        return first
    called = operators()
    suspects = [op for op in decomposition_table() if op in called][:_MOST_SUSPECTS]
    for keep in (*({op} for op in suspects), None):
        told = []
        with keeping_whole(_Kept(keep)):
            try:
                other = _tried(judge, lower, given, truth, told)
            except Exception:  # the graph cannot be made so: this way out is none
                continue
        if other.fault is None:
            whole = "any operator" if keep is None else ", ".join(map(str, keep))
            notes += [*told, f"the decomposition of {whole} is not used: with it, the graph {first.fault}"]
            return other
    return first


class _Kept:
    """Whether an operator stays whole: one of these, or, without any named, every one."""

    def __init__(self, named: set[Any] | None) -> None:
        self.named = named

    def __call__(self, operator: Any) -> bool:
        return self.named is None or operator in self.named


def _tried(judge: Judge, lower: Lower, given: Call, truth: Answer | None, notes: list[str]) -> Faithful:
    lowered, call = lower()
    examples = examples_of(judge, lowered, call, given, truth, notes)
    tried: list[Example] = []
    for example in examples:
        assert example.truth is not None
        try:
            case = _case(judge, lowered, example.call)
        except Exception as error:
            return Faithful(
                lowered, examples, f"fails where the model does not: {type(error).__name__}: {error}"
            )
        fault = judge.fault(lowered, example.truth, case.expected, case.rounding(0.0))
        if fault is not None and not judge.is_deterministic(example.call, example.truth):
            notes.append("not compared with the model: two runs of the model itself differ")
            return Faithful(lowered, [replace(e, truth=None) for e in examples])
        if fault is not None:
            return Faithful(lowered, examples, f"answers unlike the model: {fault}")
        tried.append(replace(example, case=case))
    return Faithful(lowered, tried)


def examples_of(
    judge: Judge, lowered: Lowered, call: Call, given: Call, truth: Answer | None, notes: list[str]
) -> list[Example]:
    """The call that was captured, the user's own, and the same at the least and largest sizes it may have."""
    example = example_inputs(lowered, *call)
    own = call[0] is given[0]
    calls: list[tuple[Call, list[Any], Answer | None]] = [(call, example, truth if own else None)]
    if not own:
        calls.append((given, example_inputs(lowered, *given), truth))
    calls += [(call_of(lowered, end), end, None) for end in corners(lowered, example, notes)]
    found: list[Example] = []
    for one, inputs, answer in calls:
        try:
            found.append(Example(one, inputs, answer or judge.answer(one)))
        except Exception as error:  # the model itself has no answer here: there is nothing to compare
            sizes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, torch.Tensor))
            notes.append(
                f"not verified at {sizes}, where PyTorch itself fails: {type(error).__name__}: {error}"
            )
    return found


def further_examples(judge: Judge, lowered: Lowered, calls: Sequence[Call]) -> list[Example]:
    """Further calls of the user's, with what the model and the graph answer; they must fit the graph."""
    checks = checks_of(lowered)
    for place, call in enumerate(calls):
        flat, _ = pytree.tree_flatten((tuple(call[0]), dict(call[1])))
        if len(flat) != len(checks):
            raise InputError(
                f"examples[{place}] has {len(flat)} inputs; the model is compiled for {len(checks)}"
            )
        try:
            check_inputs(checks, flat, lowered.range_constraints)
        except InputError as error:
            raise InputError(f"examples[{place}]: {error}") from error
    made = [Example(call, example_inputs(lowered, *call)) for call in calls]
    return [judged_example(judge, lowered, example) for example in made]


def judged_example(judge: Judge, lowered: Lowered, example: Example) -> Example:
    """The example with the model's answer and the graph's."""
    case = _case(judge, lowered, example.call)
    return replace(example, truth=judge.answer(example.call), case=case)


def _case(judge: Judge, lowered: Lowered, call: Call) -> Case:
    made, tail = judge.graph_answer(lowered, call)
    return Case(lowered.module, example_inputs(lowered, *copied_call(call)), made, tail=tail)


def whole_fault(
    judge: Judge,
    lowered: Lowered,
    compiled: Callable[..., Any],
    examples: Sequence[Example],
    coarsest: float,
    tolerance: float | None = None,
) -> str | None:
    """How the compiled module as a whole differs from the model; None where it answers alike.

    With a `tolerance` it may be off by so much (see `beyond_tolerance`), instead of by what rounding does.
    """
    for example in examples:
        if example.truth is None or example.case is None:
            continue
        try:
            made = judge.answer(example.call, compiled)
        except Exception as error:
            return f"fails where the model does not: {type(error).__name__}: {error}"
        if tolerance is None:
            fault = judge.fault(lowered, example.truth, made, example.case.rounding(coarsest))
        else:
            truth = example.truth.in_graph_order(lowered)
            fault = beyond_tolerance(made.in_graph_order(lowered), truth, tolerance)
        if fault is not None:
            return f"answers unlike the model: {fault}"
    return None


def suspects(graph: fx.Graph, plan: Plan, fault: str) -> Iterator[tuple[dict[fx.Node, dict[str, str]], str]]:
    """What to leave out of a plan whose pieces answer rightly and whose whole does not: refusals, and a note.

    First each engine, where there are several, then each segment.
    """
    ran = [segment for segment in plan.segments if segment.engine != PYTORCH]
    used = list(dict.fromkeys(segment.engine for segment in ran))
    for engine in used if len(used) > 1 else ():
        reason = f"with {engine}, the compiled model {fault}"
        yield {node: {engine: reason} for node in compute_nodes(graph)}, f"{engine} is not used: {reason}"
    for segment in ran[:_MOST_SUSPECTS] if len(ran) > 1 else ():
        reason = f"with {segment.nodes[0].name} and what runs with it on {segment.engine}, the model {fault}"
        yield {node: {segment.engine: reason} for node in segment.nodes}, f"a segment is moved: {reason}"


def error_of(lowered: Lowered, examples: Sequence[Example], compiled: Compiled) -> float:
    """The largest relative error of a compiled graph's results against the model's, over all examples."""
    worst = 0.0
    for example in examples:
        if example.truth is not None:
            with torch.no_grad():
                made = list(compiled.results(example.inputs))
            worst = max(worst, relative_error(made, example.truth.in_graph_order(lowered)))
    return worst


def operators_of(graph: fx.Graph) -> set[Any]:
    """What a graph calls."""
    return {node.target for node in graph.nodes if node.op == "call_function"}
