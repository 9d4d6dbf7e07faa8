"""The builder of pieces: convert, rewrite, build and compare. If a piece fails, the plan is repaired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from intarsia.build.control_flow import bodies, examples_of, other_branches, unverified
from intarsia.build.repair import bisect_failure, repair
from intarsia.build.trial import (
    Case,
    Cases,
    Failure,
    Rewrite,
    Tried,
    case_of,
    contents_of,
    left_if_empty,
    run_in_pytorch,
    try_piece,
)
from intarsia.engines import Engine, Program, PyTorch
from intarsia.engines.base import GuardedProgram
from intarsia.engines.building import OutOfTime
from intarsia.errors import EngineError
from intarsia.graph.nodes import compute_nodes
from intarsia.logs import log_refusals
from intarsia.partition import PartitionOptions, Piece, Plan, Segment, Strategy, SupportTable, extract
from intarsia.partition.strategies import require_full
from intarsia.partition.support import support_table
from intarsia.partition.table import constrain
from intarsia.runtime.fallback import Origin, WithFallback, has_empty, types_of
from intarsia.runtime.inlay import Assembly, Inlay

_TIMED_RUNS = 3  # the fastest counts, since OpenVINO prepares for sizes in the first
_TOO_SLOW = 1.1  # a plan this much slower than the best will not win after a part of it moves to PyTorch


class TooSlow(EngineError):
    """A plan with a wrong answer is slower than the best plan, so that a repaired one cannot win."""


@dataclass(frozen=True)
class Timed:
    """The example that plans are timed on, and the time that the best plan so far takes for it."""

    example: int
    best_s: Callable[[], float]  # infinite if there is no plan yet


@dataclass(frozen=True)
class BuildSettings:
    """Settings for building pieces, the same for every plan of a compile and for bodies of control flow."""

    options: PartitionOptions
    strategy: Strategy
    rewrite: Rewrite | None = None
    build_limit_s: float | None = None  # of an engine for one piece
    tolerance: float | None = None  # the error that engines of shorter arithmetic may have
    deadline: float | None = None  # by `time.perf_counter`; a later build raises OutOfTime
    timed: Timed | None = None  # a plan to be repaired that is slower than this raises TooSlow


@dataclass
class Builder:
    """Builds every piece of a plan. When the plan is repaired, correct programs are reused."""

    module: fx.GraphModule
    engines: Sequence[Engine]
    settings: BuildSettings
    examples: Sequence[Sequence[Any]] = ()  # inputs of the graph, on which every program is compared
    cases: Cases | None = None  # PyTorch's answers for pieces, which builders of one graph may share
    notes: list[str] = field(default_factory=list)  # for the user
    faults: dict[fx.Node, dict[str, str]] = field(default_factory=dict)  # found by bisection, by engine
    body_plans: dict[str, Plan] = field(default_factory=dict, init=False)  # of control flow, by name
    errors: dict[str, float] = field(default_factory=dict, init=False)  # of shorter arithmetic, by first node
    is_traded: bool = field(default=False, init=False)  # whether a pattern that may be slower was applied
    first_s: float = field(default=0.0, init=False)  # of the first calls of programs on the timed example
    _built: dict[tuple[str, tuple[str, ...]], Program] = field(default_factory=dict, init=False)
    _lost: dict[str, Failure] = field(default_factory=dict, init=False)  # engines that took too long

    def of_block(
        self, module: fx.GraphModule, engines: Sequence[Engine], inputs: Sequence[Any], **changes: Any
    ) -> Builder:
        """A builder for a part of the graph, which is only measured, on other engines.

        `require_full_compilation` does not apply to a part.
        """
        options: PartitionOptions = changes.pop("options", self.settings.options)
        options = replace(options.among([e.name for e in engines]), require_full_compilation=False)
        settings = replace(self.settings, options=options, **changes)
        return Builder(module, engines, settings, [inputs] if self.examples else ())

    def plan(self, table: SupportTable) -> Plan:
        """The strategy's plan for the graph, before anything is built."""
        options = self.settings.options
        return self.settings.strategy(self.module, constrain(self.module, table, options), options)

    def run(self, table: SupportTable) -> Assembly:
        """A plan, its pieces and their programs, which all answer as PyTorch does.

        If a piece fails, the plan is repaired.
        """
        options = self.settings.options
        table = constrain(self.module, table, options)
        plan = self.settings.strategy(self.module, table, options)
        while True:
            pieces = extract(self.module, plan.verify(self.module))
            programs, refusals = self._build_all(pieces)
            if not refusals:
                return Assembly(plan, pieces, programs, self.body_plans)
            log_refusals(refusals)
            repaired = repair(self.module, plan, table, refusals, options)
            if repaired is None:
                table = table.with_refusals(refusals)
                plan = self.settings.strategy(self.module, table, options)
            else:
                plan, table = repaired
            if options.require_full_compilation:
                require_full(plan.segments)

    def _build_all(self, pieces: list[Piece]) -> tuple[list[Program], dict[fx.Node, dict[str, str]]]:
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        values = [dict(zip(placeholders, example, strict=True)) for example in self.examples]
        programs: list[Program] = []
        refusals: dict[fx.Node, dict[str, str]] = {}
        answers = self.cases = self.cases or Cases(self.module)
        timed = self.settings.timed
        for piece in pieces:
            cases = [answers.of(piece, number, known) for number, known in enumerate(values)]
            key = (piece.segment.engine, contents_of(piece))
            program = self._built.get(key)
            if program is None:
                sample = cases[timed.example] if timed and cases else None
                outcome = self._build(piece.module, piece.segment.engine, cases, sample)
                if isinstance(outcome, Failure):
                    refusals.update(self._blame(piece, outcome, cases))
                    continue
                program = self._built[key] = outcome
            programs.append(program)
        return programs, refusals

    def _build(
        self, module: fx.GraphModule, engine_name: str, cases: Sequence[Case], sample: Case | None = None
    ) -> Program | Failure:
        engine = next(engine for engine in self.engines if engine.name == engine_name)
        if isinstance(engine, PyTorch):
            self._build_bodies(module, cases)
            return engine.build(module)
        cases = [*cases, *other_branches(module, cases, self.notes)]
        tried = self._try_both(module, engine, cases, sample)
        full = [case for case in cases if not has_empty(case.inputs)]
        if isinstance(tried, Failure) and not (tried.nodes or tried.for_good) and 0 < len(full) < len(cases):
            reason = tried.reason
            again = self._try_both(module, engine, full)
            if not isinstance(again, Failure):
                self.notes.append(left_if_empty(engine_name, reason))
                tried = replace(again, only_full=True)
        if isinstance(tried, Failure):
            return tried
        self.is_traded |= tried.is_traded
        self.first_s += 0.0 if sample is None else tried.seconds.get(sample, 0.0)
        if not engine.is_exact:
            self.errors[compute_nodes(module.graph)[0].name] = tried.error
        returned: Any = module.graph.output_node().args[0]
        types = types_of([node.meta.get("val") for node in returned])
        # Guards get PyTorch as a fallback only now: on the examples, a refusal is a failure.
        strict = self.settings.options.require_full_compilation
        return WithFallback(
            tried.program, Origin(engine, module, tried.network, tried.only_full), types, strict=strict
        )

    def _try_both(
        self, module: fx.GraphModule, engine: Engine, cases: Sequence[Case], sample: Case | None = None
    ) -> Tried | Failure:
        """Try a piece rewritten and, if that fails, without rewriting."""
        outcome = self._try(module, engine, cases, self.settings.rewrite)
        if isinstance(outcome, Failure) and sample is not None:
            self._check_speed(engine, outcome, sample)
        if (
            isinstance(outcome, Failure)
            and not (outcome.nodes or outcome.for_good)
            and self.settings.rewrite is not None
        ):
            plain = self._try(module, engine, cases, None)
            if not isinstance(plain, Failure):
                self.notes.append(
                    f"a segment on {engine.name} is not rewritten: after rewriting, {outcome.reason}"
                )
                outcome = plain
        return outcome

    def _try(
        self, module: fx.GraphModule, engine: Engine, cases: Sequence[Case], rewrite: Rewrite | None
    ) -> Tried | Failure:
        if engine.name in self._lost:
            return self._lost[engine.name]
        settings = self.settings
        if settings.deadline is not None and time.perf_counter() > settings.deadline:
            raise OutOfTime("its pieces could not all be built and run within the time limit")
        outcome = try_piece(
            module, engine, cases, rewrite, settings.build_limit_s, self.notes, settings.tolerance
        )
        if isinstance(outcome, Failure) and outcome.for_good:
            self._lost[engine.name] = outcome
        return outcome

    def _check_speed(self, engine: Engine, failure: Failure, sample: Case) -> None:
        """Raise TooSlow if a failed piece takes longer than the best plan takes for the whole graph.

        Without this check, the search for the nodes at fault took 101 of 159 s for T5's encoder on OpenVINO,
        which was 1.24 times slower than the best plan.
        """
        timed = self.settings.timed
        if failure.program is None or timed is None:
            return
        best, took = timed.best_s(), math.inf
        if math.isinf(best):
            return
        program = failure.program
        if isinstance(program, GuardedProgram):  # the engine runs before a guard refuses its results
            program = program.unguarded()
        for _ in range(_TIMED_RUNS):
            start = time.perf_counter()
            try:
                program(*sample.inputs)
            except Exception:  # it answers only some calls, so its time is unknown
                return
            took = min(took, time.perf_counter() - start)
        if took > _TOO_SLOW * best:
            raise TooSlow(
                f"{failure.reason}; it is not repaired, since it takes {took * 1e3:.3g} ms, and the best plan"
                f" {best * 1e3:.3g} (on {engine.name})"
            )

    def _build_bodies(self, module: fx.GraphModule, cases: Sequence[Case]) -> None:
        """Replace the bodies of control flow by compiled ones, compared on the operands of the examples."""
        inner_graphs = list(bodies(module))
        runs = [examples_of(module, case.inputs) for case in cases] if inner_graphs else []
        for node, name, body in inner_graphs:
            key = f"{node.name}.{name}"
            tries = []
            for operands in [run[name] for run in runs]:
                if operands is None:
                    self.notes.append(unverified(key))
                    continue
                try:
                    run_in_pytorch(body, operands)
                except Exception as error:  # the operands may be meant for another branch
                    self.notes.append(unverified(key, error))
                else:
                    tries.append(operands)
            inner = Builder(body, self.engines, replace(self.settings, timed=None), tries)
            inner._lost = self._lost
            built = inner.run(support_table(body, self.engines, self.settings.build_limit_s))
            setattr(module, name, Inlay(body.graph, built))
            self.body_plans |= built.plans_under(key)
            self.notes += inner.notes

    def _blame(self, piece: Piece, failure: Failure, cases: Sequence[Case]) -> dict[fx.Node, dict[str, str]]:
        """The nodes of a failed piece that must leave its engine, with reasons."""
        engine = piece.segment.engine
        by_name = {node.name: node for node in (*piece.segment.nodes, *piece.segment.recomputed)}
        if failure.nodes or failure.for_good:
            return {by_name[name]: {engine: failure.reason} for name in failure.nodes or by_name}
        if next(one for one in self.engines if one.name == engine).slow_to_build:
            return {node: {engine: failure.reason} for node in piece.segment.nodes}
        failed = cases if failure.case is None else [failure.case]
        values = [values_of(piece.module, case.inputs) for case in failed]
        suspects = [node for node in compute_nodes(piece.module.graph) if node.name in by_name]

        def fails(nodes: Sequence[fx.Node]) -> str | None:
            if len(nodes) == len(suspects):
                return failure.reason
            part, count = part_of(piece.module, engine, nodes), len(self.notes)
            outcome = self._build(part.module, engine, [case_of(part, known) for known in values])
            del self.notes[count:]  # notes on parts are not for the user
            return outcome.reason if isinstance(outcome, Failure) else None

        kinds = {node: node_kind(node) for node in suspects}

        def alike(node: fx.Node) -> list[fx.Node]:
            return [other for other in suspects if kinds[other] == kinds[node]]

        blamed = bisect_failure(suspects, fails, alike=alike) or dict.fromkeys(suspects, failure.reason)
        for node, reason in blamed.items():
            self.faults.setdefault(by_name[node.name], {})[engine] = reason
        return {by_name[node.name]: {engine: reason} for node, reason in blamed.items()}


def node_kind(node: fx.Node) -> str:
    """A key that is equal for nodes that differ only in the values of their inputs."""
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    shapes = [(value.dtype, tuple(value.shape)) for value in values if isinstance(value, torch.Tensor)]
    constants = [arg for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
    return f"{node.target} {constants} {shapes}"


def part_of(module: fx.GraphModule, engine: str, nodes: Sequence[fx.Node]) -> Piece:
    """Consecutive nodes of a piece as a piece of their own."""
    all_nodes = compute_nodes(module.graph)
    inside = set(nodes)
    first = next(i for i, node in enumerate(all_nodes) if node in inside)
    last = max(i for i, node in enumerate(all_nodes) if node in inside)
    ranges = [all_nodes[:first], all_nodes[first : last + 1], all_nodes[last + 1 :]]
    segments = tuple(Segment(engine, tuple(r)) for r in ranges if r)
    pieces = extract(module, Plan(segments))
    return next(
        piece for piece in pieces if piece.segment.nodes and piece.segment.nodes[0] is all_nodes[first]
    )


def values_of(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The values of a graph's nodes in PyTorch."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*inputs)
    return dict(interpreter.env)
