"""Trying one piece on one engine: convert, rewrite, build, run on examples, compare with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from intarsia.compare import disagreement, relative_error
from intarsia.convert import NodeError, convert
from intarsia.engines import Engine, GraphEngine, NetworkEngine, Program
from intarsia.engines.building import OutOfTime, within
from intarsia.errors import IntarsiaError, error_text
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.piece import Piece
from intarsia.network import Network
from intarsia.rewrite import Patterns, apply, is_traded, patterns_by_engine
from intarsia.rounding import Rounding
from intarsia.runtime.fallback import has_empty
from intarsia.runtime.weights import releasing_memory

Rewrite = Callable[[Network, NetworkEngine], tuple[Sequence[str], bool]]  # notes; `is_traded` of the log


def elements_of(inputs: Sequence[Any]) -> int:
    """The number of elements in a call's tensors."""
    return sum(value.numel() for value in inputs if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Failure:
    """Why a piece does not run on its engine, and the nodes at fault if they are known."""

    reason: str
    nodes: tuple[str, ...] = ()
    for_good: bool = False  # the engine cannot be used, so no part of the piece is tried
    program: Program | None = None  # the program, if it was built; its time can be measured
    case: Case | None = None  # the case at which it failed


@dataclass(frozen=True)
class Tried:
    """A program that answers as PyTorch does, and the network it was built from, if there is one."""

    program: Program
    network: Network | None
    error: float = 0.0  # the largest on any case, as a share of an output's largest value; 0 if exact
    only_full: bool = False  # PyTorch answers calls with an empty tensor
    seconds: Mapping[Case, float] = field(default_factory=dict)  # of the run on each case
    is_traded: bool = False  # whether a pattern that may be slower here rewrote the network


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of a piece, and PyTorch's results for them.

    A piece that is the `whole` graph gives the results at some `places` of it.
    """

    module: fx.GraphModule
    inputs: list[Any]
    expected: tuple[Any, ...]
    whole: Case | None = None
    places: tuple[int, ...] = ()
    _roundings: dict[float, Rounding] = field(default_factory=dict, init=False)

    @property
    def elements(self) -> int:
        return elements_of(self.inputs)

    def rounding(self, coarsest: float) -> Rounding:
        """The effect of rounding on the answer. Its runs are made at the first access."""
        if self.whole is not None:
            return self.whole.rounding(coarsest).of(self.expected, self.places)
        if coarsest not in self._roundings:
            self._roundings[coarsest] = Rounding(self.module, self.inputs, self.expected, coarsest)
        return self._roundings[coarsest]


def try_piece(
    module: fx.GraphModule,
    engine: Engine,
    cases: Sequence[Case],
    rewrite: Rewrite | None,
    limit_s: float | None,
    notes: list[str],
    tolerance: float | None = None,
) -> Tried | Failure:
    """The program of a piece if it builds and runs in time and answers as PyTorch does; else the failure.

    Small cases come first: most wrong answers occur on them, and the search for the faulty node runs a case
    many times. Any exception of an engine or a converter is a failure of this piece. With a `tolerance`,
    answers may differ by as much, if rounding alone differs less.
    """
    fresh: list[str] = []
    seconds: dict[Case, float] = {}
    error_of = 0.0
    try:
        tried = _built(module, engine, rewrite, limit_s, fresh)
    except NodeError as error:
        return Failure(error.reason, (error.node.name,))
    except OutOfTime as error:
        return Failure(str(error), for_good=True)
    except IntarsiaError as error:
        return Failure(str(error))
    except Exception as error:
        return Failure(f"{engine.name} failed to build it: {error_text(error)}")
    why = _fails_on_empty(engine, tried.network)
    if why is not None:
        tried = replace(tried, only_full=True)
        fresh.append(left_if_empty(engine.name, why))
        cases = [case for case in cases if not has_empty(case.inputs)]
    for case in sorted(cases, key=lambda case: case.elements):
        start = time.perf_counter()
        try:
            answers = within(limit_s, f"{engine.name}'s run", partial(tried.program, *case.inputs))
            seconds[case] = time.perf_counter() - start
        except OutOfTime as error:
            return Failure(str(error), for_good=True)
        except Exception as error:
            return Failure(
                f"{engine.name} failed to run it: {error_text(error)}", program=tried.program, case=case
            )
        wrong = disagreement(answers, case.expected, case.rounding(engine.coarsest), tolerance)
        if wrong is not None:
            return Failure(f"{engine.name} answers wrongly: {wrong}", program=tried.program, case=case)
        if not engine.is_exact:
            error_of = max(error_of, relative_error(answers, case.expected))
    notes += [note for note in fresh if note not in notes]
    return replace(tried, error=error_of, seconds=seconds)


def _built(
    module: fx.GraphModule, engine: Engine, rewrite: Rewrite | None, limit_s: float | None, notes: list[str]
) -> Tried:
    if isinstance(engine, GraphEngine):
        return Tried(within(limit_s, f"{engine.name}.build", lambda: engine.build(module)), None)
    assert isinstance(engine, NetworkEngine)
    net = convert(module, name=engine.name, notes=notes, engine=engine)
    changes, is_traded = ((), False) if rewrite is None else rewrite(net, engine)
    notes += changes
    with releasing_memory(module):
        program = within(limit_s, f"{engine.name}.build", lambda: engine.build(net))
    return Tried(program, net, is_traded=is_traded)


def _fails_on_empty(engine: Engine, net: Network | None) -> str | None:
    if net is None or not isinstance(engine, NetworkEngine):
        return None
    varies = any(not isinstance(size, int) for tensor in net.get_inputs() for size in tensor.shape)
    return engine.fails_on_empty(net) if varies else None


def left_if_empty(engine: str, why: str) -> str:
    """The note on a segment for whose calls with an empty tensor PyTorch is used."""
    return f"a segment on {engine} leaves calls without elements to PyTorch: {why}"


def run_in_pytorch(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a graph in PyTorch."""
    with torch.no_grad():
        answer = module(*inputs)
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


class Cases:
    """The cases of a graph's pieces, by example and piece. `whole` has those of the graph itself, if known.

    A piece that is the whole graph shares the graph's answer, and the runs that measure rounding.
    """

    def __init__(self, module: fx.GraphModule, whole: Sequence[Case | None] = ()) -> None:
        returned: Any = module.graph.output_node().args[0]
        results = returned if isinstance(returned, list | tuple) else (returned,)
        self._returned = tuple(getattr(node, "name", None) for node in results)
        self._count = len(compute_nodes(module.graph))
        self._whole = whole
        self._cases: dict[tuple[int, tuple[str, ...]], Case] = {}

    def of(self, piece: Piece, number: int, values: dict[fx.Node, Any]) -> Case:
        """The case of a piece on example `number`; its results are added to `values`."""
        key = (number, contents_of(piece))
        case = self._cases.get(key)
        if case is None:
            whole = self._whole[number] if number < len(self._whole) else None
            case = self._cases[key] = self._new(piece, values, whole)
        values.update(zip(piece.outputs, case.expected, strict=True))
        return case

    def _new(self, piece: Piece, values: dict[fx.Node, Any], whole: Case | None) -> Case:
        is_part = len({*piece.segment.nodes, *piece.segment.recomputed}) < self._count
        if whole is None or is_part or any(node.name not in self._returned for node in piece.outputs):
            return case_of(piece, values)
        places = tuple(self._returned.index(node.name) for node in piece.outputs)
        expected = tuple(whole.expected[place] for place in places)
        return Case(piece.module, [values[node] for node in piece.inputs], expected, whole, places)


def case_of(piece: Piece, values: dict[fx.Node, Any]) -> Case:
    """The case of a piece with inputs from `values`, to which PyTorch's results are added."""
    inputs = [values[node] for node in piece.inputs]
    expected = run_in_pytorch(piece.module, inputs)
    values.update(zip(piece.outputs, expected, strict=True))
    return Case(piece.module, inputs, expected)


def contents_of(piece: Piece) -> tuple[str, ...]:
    """A key of everything that the piece's program depends on."""
    parts = (piece.inputs, piece.segment.nodes, piece.segment.recomputed, piece.outputs)
    return tuple(" ".join(node.name for node in part) for part in parts)


def rewriter(patterns: Patterns, engines: Sequence[Engine], device: str = "cpu") -> Rewrite:
    """A function that rewrites a network for an engine. Names of patterns are checked at once."""
    network_engines = [engine for engine in engines if isinstance(engine, NetworkEngine)]
    chosen = patterns_by_engine(patterns, network_engines)
    all_patterns = patterns is True or patterns == "all"

    def rewrite(net: Network, engine: NetworkEngine) -> tuple[list[str], bool]:
        log = apply(net, engine=engine, patterns=chosen[engine.name], device=device)
        notes = log.failures()
        if all_patterns:  # the user wants all of them, so the plan says which are left out
            for name, reason in log.skipped.items():
                notes.append(f"{engine.name}: pattern {name!r} is left out: {reason}")
            if not engine.patterns():
                notes.append(f"{engine.name}: it supports none of the shipped patterns")
        return notes, is_traded(log)

    return rewrite
