"""The judge: the user's model, run eagerly. A graph and a compiled module must give the model's answers.

Engines are compared with the model and not with the lowered graph, which would hide a wrong decomposition or
a branch that capture does not take. This costs one eager run for each example. If the lowered graph differs
from the model, the model is lowered again without decompositions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.build.trial import Case, elements_of
from intarsia.capture.example import Call as Call
from intarsia.capture.example import copied_call
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import undisturbed
from intarsia.compare import disagreement, relative_error
from intarsia.errors import InputError, UnrepeatableError
from intarsia.lower import Lowered, Role
from intarsia.lower.decompositions import decomposition_table, keeping_whole
from intarsia.lower.integers import other_values
from intarsia.lower.lowered import example_inputs
from intarsia.lower.size_examples import corners
from intarsia.rounding import Rounding
from intarsia.runtime.call_interface import check_inputs, checks_of
from intarsia.runtime.compiled import Compiled

_MOST_SUSPECTS = 12


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its results, and its arguments and the model's buffers afterwards."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    inputs: list[Any]
    buffers: dict[str, torch.Tensor]
    seconds: float = 0.0  # that the call took

    def of(self, lowered: Lowered) -> Answer:
        """The answer without buffers that the graph does not write to, which would keep weights alive."""
        written = {output.target for output in lowered.outputs if output.role is Role.BUFFER}
        return replace(self, buffers={name: b for name, b in self.buffers.items() if name in written})

    def in_graph_order(self, lowered: Lowered) -> list[Any]:
        """The values in the order of the graph's outputs: those written back, and the results."""
        leaves = iter(self.leaves)
        places = {item.name: item.index for item in lowered.inputs}
        values: list[Any] = []
        for output in lowered.outputs:
            if output.role is Role.USER:
                values.append(next(leaves, None))
            elif output.role is Role.BUFFER:
                values.append(self.buffers.get(output.target or ""))
            else:
                values.append(self.inputs[places[output.target or ""] or 0])
        return values


class Judge:
    """Runs a model, or its compiled form, on copies of a call. The model does not change."""

    def __init__(self, model: nn.Module | ExportedProgram) -> None:
        self.model: nn.Module = model.module() if isinstance(model, ExportedProgram) else model

    def answer(self, call: Call, function: Callable[..., Any] | None = None) -> Answer:
        """The answer of the model, or of another function, such as the compiled module."""
        args, kwargs = copied_call(call)
        flat = pytree.tree_leaves((args, kwargs))
        with undisturbed(self.model) as value_of:
            began = time.perf_counter()
            results = (self._run if function is None else function)(*args, **kwargs)
            seconds = time.perf_counter() - began
            leaves, structure = pytree.tree_flatten(open_objects(results))
            # A result may share memory with a buffer, which is restored.
            leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
            buffers = {name: value_of(buffer) for name, buffer in self._state()}
        return Answer(leaves, structure, flat, buffers, seconds)

    def answer_if_any(self, call: Call) -> Answer | None:
        """The answer of the model; None if it fails. Capture then fails, too, and reports the line."""
        try:
            return self.answer(call)
        except Exception:
            return None

    def fault(
        self,
        lowered: Lowered,
        truth: Answer,
        other: Answer | Sequence[Any],
        rounding: Rounding | None,
        tolerance: float | None = None,
        rows: int = 1,
    ) -> str | None:
        """How another answer differs from the model's, in a clause; None if they agree."""
        if isinstance(other, Answer):
            if len(other.leaves) != len(truth.leaves):
                return f"it gives {len(other.leaves)} results; the model gives {len(truth.leaves)}"
            other = other.in_graph_order(lowered)
        if truth.structure != lowered.out_spec:
            return f"it gives results as {lowered.out_spec}; the model as {truth.structure}"
        return disagreement(other, truth.in_graph_order(lowered), rounding, tolerance, rows)

    def is_deterministic(self, call: Call, truth: Answer) -> bool:
        """Whether the model gives the same answer with other random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.rand(1)
            return _are_alike(self.answer(call), truth)

    def repeats(self, call: Call) -> bool:
        """Whether two runs of the model with the same random numbers give the same answer."""
        return _are_alike(self.answer(call), self.answer(call))

    def graph_answer(self, lowered: Lowered, call: Call) -> tuple[Any, ...]:
        """The answer of the lowered graph, run in PyTorch."""
        with undisturbed(self.model):
            return tuple(lowered.module(*example_inputs(lowered, *copied_call(call))))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # A graph prints the traceback before it raises (torch 2.13), also where a size is only tried.
        is_graph = isinstance(self.model, fx.GraphModule)
        return (partial(nn.Module.__call__, self.model) if is_graph else self.model)(*args, **kwargs)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_buffers(remove_duplicate=False)
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value


def _are_alike(one: Answer, other: Answer) -> bool:
    if one.structure != other.structure or len(one.leaves) != len(other.leaves):
        return False
    return disagreement(one.leaves, other.leaves) is None


def call_of(lowered: Lowered, inputs: Sequence[Any]) -> Call:
    """The call for which the graph has these inputs."""
    flat = {i.index: value for i, value in zip(lowered.inputs, inputs, strict=True) if i.index is not None}
    call: Call = pytree.tree_unflatten([flat[place] for place in range(len(flat))], lowered.in_spec)
    return call


@dataclass(frozen=True)
class Example:
    """A call, the graph's inputs for it, and the model's answer; None if the model draws random numbers.

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
    def eager_s(self) -> float:
        """The seconds that the model took to answer."""
        return 0.0 if self.truth is None else self.truth.seconds

    @property
    def rows(self) -> int:
        """The number of rows in a batch: the length of every input, or 1 if lengths differ."""
        lengths = {len(value) for value in self.inputs if isinstance(value, torch.Tensor) and value.ndim}
        return lengths.pop() if len(lengths) == 1 else 1


@dataclass(frozen=True)
class LoweredModel:
    """A lowered graph, the examples that it is compared on, and notes for the user.

    With a `fault`, it differs from the model and must not be used.
    """

    lowered: Lowered
    examples: list[Example]
    notes: tuple[str, ...] = ()
    fault: str | None = None
    differences: tuple[str, ...] = ()  # when it can answer differently for calls other than the examples


def faithful_lowering(
    judge: Judge,
    first: LoweredModel,
    lower: Callable[[], LoweredModel],
    operators: Callable[[], set[Any]],
) -> LoweredModel:
    """A lowered model whose graph answers as the model does.

    If the `first` graph does not, the model is lowered again without decompositions: without each of them,
    then without all; `operators` returns those of the model. If every graph differs, the first is returned.
    """
    checked = _checked(judge, first)
    if checked.fault is None:
        return checked
    called = operators()
    suspected = [op for op in decomposition_table() if op in called][:_MOST_SUSPECTS]
    for whole in (*({op} for op in suspected), None):
        with keeping_whole(_IsKept(whole)):
            try:
                other = _checked(judge, lower())
            except Exception:  # the model cannot be lowered without these decompositions
                continue
        if other.fault is None:
            names = "any operator" if whole is None else ", ".join(map(str, whole))
            note = f"the decomposition of {names} is not used: with it, the graph {checked.fault}"
            return replace(other, notes=(*other.notes, note))
    return checked


class _IsKept:
    """Whether an operator is not decomposed: if it is one of these, or always for None."""

    def __init__(self, operators: set[Any] | None) -> None:
        self.operators = operators

    def __call__(self, operator: Any) -> bool:
        return self.operators is None or operator in self.operators


def _checked(judge: Judge, graph: LoweredModel) -> LoweredModel:
    """The graph with its answers to the examples, or with the fault that they show."""
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
    """The examples of a compile: the captured call, the user's own, and calls of other sizes and integers.

    The notes name the sizes at which nothing can be compared. `truth` is the model's answer to its `own`
    call, which lowering may have widened to the `captured` one.
    """
    notes: list[str] = []
    inputs = example_inputs(lowered, *captured)
    is_own = captured[0] is own[0]
    calls: list[tuple[Call, list[Any], Answer | None]] = [(captured, inputs, truth if is_own else None)]
    if not is_own:
        calls.append((own, example_inputs(lowered, *own), truth))
    for others in (corners(lowered, inputs, notes), other_values(lowered, inputs)[:1]):
        calls += [(call_of(lowered, other), other, None) for other in others]
    examples: list[Example] = []
    for call, graph_inputs, answer in calls:
        try:
            examples.append(Example(call, graph_inputs, (answer or judge.answer(call)).of(lowered)))
        except Exception as error:  # the model itself fails, so there is nothing to compare
            sizes = ", ".join(str(tuple(x.shape)) for x in graph_inputs if isinstance(x, torch.Tensor))
            notes.append(
                f"not verified at {sizes}, where PyTorch itself fails: {type(error).__name__}: {error}"
            )
    return examples, notes


def with_layouts_of(judge: Judge, lowered: Lowered, examples: Sequence[Example]) -> Lowered:
    """The graph, whose results have the memory layouts of the model's own."""
    truth = examples[0].truth if examples else None
    if truth is None:
        return lowered

    def results(call: Call) -> list[Any] | None:
        answer = judge.answer_if_any(call)
        return None if answer is None else answer.leaves

    layouts = lowered.layouts.as_returned(truth.leaves, examples[0].call, results)
    return lowered if layouts is lowered.layouts else replace(lowered, layouts=layouts)


def further_examples(judge: Judge, lowered: Lowered, calls: Sequence[Call]) -> list[Example]:
    """The user's further examples, with the answers of model and graph; InputError if one does not fit."""
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
    """The example with the answers of the model and the graph."""
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
    """How the answers of a compiled module differ from the model's; None if they agree.

    With a `tolerance`, they may differ by as much, if rounding alone differs less.
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
        # Errors of the model against float64 excuse a difference only if the graph agrees with the model.
        case = example.case or _case(judge, lowered, example.call)
        fault = judge.fault(lowered, example.truth, case.expected, case.rounding(0.0))
        if fault is not None:
            return f"is of a graph that differs from the model: {fault}"
        rounding = case.rounding(coarsest).of(example.truth.in_graph_order(lowered))
        fault = judge.fault(lowered, example.truth, answer, rounding, tolerance, example.rows)
        if fault is not None:
            return f"differs from the model: {fault}"
    return None


def error_of(lowered: Lowered, examples: Sequence[Example], compiled: Compiled) -> float:
    """The largest relative error of a compiled graph's results, over all examples."""
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
