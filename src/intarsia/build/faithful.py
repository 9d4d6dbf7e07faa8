"""A lowered graph that answers as the model does: tried on every example, mended where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.build.judge import Answer, Call, Judge, call_of
from intarsia.build.trial import Case, elements_of
from intarsia.capture.example import copied_call
from intarsia.compare import relative_error
from intarsia.errors import InputError, UnrepeatableError
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered
from intarsia.lower.decompositions import decomposition_table, keeping_whole
from intarsia.lower.integers import other_values
from intarsia.lower.lowered import example_inputs
from intarsia.lower.range_ends import corners
from intarsia.partition.table import PYTORCH
from intarsia.runtime.call_interface import check_inputs, checks_of
from intarsia.runtime.compiled import Compiled

_MOST_SUSPECTS = 12


@dataclass(frozen=True)
class Example:
    """A call, what the graph is fed for it, and what the model answers; None where the model draws lots.

    `case` has the graph's own answer, once it has been asked for: of calls larger than the user's, only if
    the compiled module answers unlike the model.
    """

    call: Call
    inputs: list[Any]
    truth: Answer | None = None
    case: Case | None = None

    @property
    def elements(self) -> int:
        return elements_of(self.inputs)

    @property
    def rows(self) -> int:
        """The rows of a batch: how long every input is; 1 where inputs differ."""
        lengths = {len(value) for value in self.inputs if isinstance(value, torch.Tensor) and value.ndim}
        return lengths.pop() if len(lengths) == 1 else 1


@dataclass(frozen=True)
class LoweredModel:
    """A lowered graph, the examples it is tried on, and notes for the user.

    With a `fault` it answers unlike the model and must not be used.
    """

    lowered: Lowered
    examples: list[Example]
    notes: tuple[str, ...] = ()
    fault: str | None = None
    differences: tuple[str, ...] = ()  # when the graph can answer differently, though not on the examples


def faithful_lowering(
    judge: Judge,
    first: LoweredModel,
    lower: Callable[[], LoweredModel],
    operators: Callable[[], set[Any]],
) -> LoweredModel:
    """A lowered model whose graph answers as the model does.

    Where the `first` graph does not, the model is lowered again without decompositions, one by one and then
    without any; `operators` names those of the model. A graph that still has a fault is returned with it.
    """
    checked = _checked(judge, first)
    if checked.fault is None:
        return checked
    called = operators()
    suspected = [op for op in decomposition_table() if op in called][:_MOST_SUSPECTS]
    for whole in (*({op} for op in suspected), None):
        with keeping_whole(_StaysWhole(whole)):
            try:
                other = _checked(judge, lower())
            except Exception:  # the graph cannot be made so: try the next
                continue
        if other.fault is None:
            names = "any operator" if whole is None else ", ".join(map(str, whole))
            note = f"the decomposition of {names} is not used: with it, the graph {checked.fault}"
            return replace(other, notes=(*other.notes, note))
    return checked


class _StaysWhole:
    """Whether an operator is not decomposed: one of these, or, without any named, every one."""

    def __init__(self, named: set[Any] | None) -> None:
        self.named = named

    def __call__(self, operator: Any) -> bool:
        return self.named is None or operator in self.named


def _checked(judge: Judge, graph: LoweredModel) -> LoweredModel:
    """The graph with its own answers to the examples, or with the fault that they show."""
    lowered, answered = graph.lowered, list[Example]()
    for example in graph.examples:
        assert example.truth is not None
        # At the ends of its ranges a run takes 16 times what one of the example does: three of them were half
        # of the CPU time that DistilBERT was compiled for.
        if example.elements > graph.examples[0].elements:
            answered.append(example)
            continue
        try:
            case = _case(judge, lowered, example.call)
        except Exception as error:
            fault = f"fails where the model does not: {type(error).__name__}: {error}"
            return replace(graph, fault=fault)
        mismatch = judge.fault(lowered, example.truth, case.expected, case.rounding(0.0))
        if mismatch is not None and not judge.repeats(example.call):
            raise UnrepeatableError(
                "two runs of the model with the same random numbers differ: it has state in Python or reads"
                " a clock, which a graph cannot repeat"
            )
        if mismatch is not None and not judge.is_deterministic(example.call, example.truth):
            note = "not compared with the model: two runs of the model itself differ"
            examples = [replace(e, truth=None) for e in graph.examples]
            return replace(graph, examples=examples, notes=(*graph.notes, note))
        if mismatch is not None:
            return replace(graph, fault=f"differs from the model: {mismatch}")
        answered.append(replace(example, case=case))
    return replace(graph, examples=answered)


def examples_of(
    judge: Judge, lowered: Lowered, captured: Call, own: Call, truth: Answer | None
) -> tuple[list[Example], list[str]]:
    """The call that was captured, the user's own, the same at the least and largest sizes it may have,
    and with another value of the integers that vary.

    The notes name the sizes at which nothing can be compared. `truth` is the model's answer to the `given`
    call, which lowering may have widened to the `captured` one.
    """
    notes: list[str] = []
    inputs = example_inputs(lowered, *captured)
    is_given = captured[0] is own[0]
    calls: list[tuple[Call, list[Any], Answer | None]] = [(captured, inputs, truth if is_given else None)]
    if not is_given:
        calls.append((own, example_inputs(lowered, *own), truth))
    for others in (corners(lowered, inputs, notes), other_values(lowered, inputs)[:1]):
        calls += [(call_of(lowered, other), other, None) for other in others]
    examples: list[Example] = []
    for call, graph_inputs, answer in calls:
        try:
            examples.append(Example(call, graph_inputs, (answer or judge.answer(call)).of(lowered)))
        except Exception as error:  # the model itself has no answer here: there is nothing to compare
            sizes = ", ".join(str(tuple(x.shape)) for x in graph_inputs if isinstance(x, torch.Tensor))
            notes.append(
                f"not verified at {sizes}, where PyTorch itself fails: {type(error).__name__}: {error}"
            )
    return examples, notes


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
    examples = [Example(call, example_inputs(lowered, *call)) for call in calls]
    return [judged_example(judge, lowered, example) for example in examples]


def judged_example(judge: Judge, lowered: Lowered, example: Example) -> Example:
    """The example with the model's answer and the graph's."""
    case = _case(judge, lowered, example.call)
    return replace(example, truth=judge.answer(example.call).of(lowered), case=case)


def _case(judge: Judge, lowered: Lowered, call: Call) -> Case:
    expected = judge.graph_answer(lowered, call)
    return Case(lowered.module, example_inputs(lowered, *copied_call(call)), expected)


def whole_fault(
    judge: Judge,
    lowered: Lowered,
    compiled: Callable[..., Any],
    examples: Sequence[Example],
    coarsest: float,
    tolerance: float | None = None,
) -> str | None:
    """How the compiled module as a whole differs from the model; None where it answers alike.

    With a `tolerance` it may be off by that much where rounding does less.
    """
    for example in examples:
        if example.truth is None:
            continue
        try:
            answer = judge.answer(example.call, compiled)
        except Exception as error:
            return f"fails where the model does not: {type(error).__name__}: {error}"
        if judge.fault(lowered, example.truth, answer, None) is None:
            continue
        # How far the model is from float64 excuses an answer only where the graph is the model's.
        case = example.case or _case(judge, lowered, example.call)
        fault = judge.fault(lowered, example.truth, case.expected, case.rounding(0.0))
        if fault is not None:
            return f"is of a graph that differs from the model: {fault}"
        rounding = case.rounding(coarsest).of(example.truth.in_graph_order(lowered))
        fault = judge.fault(lowered, example.truth, answer, rounding, tolerance, example.rows)
        if fault is not None:
            return f"differs from the model: {fault}"
    return None


def suspects(graph: fx.Graph, plan: Plan, fault: str) -> Iterator[tuple[dict[fx.Node, dict[str, str]], str]]:
    """What to exclude from a plan whose pieces are correct but whose whole is not: refusals, and a note.

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
                results = list(compiled.results(example.inputs))
            truth = example.truth.in_graph_order(lowered)
            worst = max(worst, relative_error(results, truth, example.rows))
    return worst


def operators_of(graph: fx.Graph) -> set[Any]:
    """The targets that a graph calls."""
    return {node.target for node in graph.nodes if node.op == "call_function"}
