"""One piece on one engine: convert, rewrite, build, run on examples, compare with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from intarsia.compare import disagreement, relative_error
from intarsia.convert import NodeError, convert
from intarsia.engines import Engine, GraphEngine, NetworkEngine, Program
from intarsia.engines.time_limit import OutOfTime, within
from intarsia.errors import IntarsiaError, error_text
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.piece import Piece
from intarsia.network import Network
from intarsia.rewrite import Patterns, apply, patterns_by_engine
from intarsia.rounding import Rounding
from intarsia.runtime.fallback import has_empty

Rewrite = Callable[[Network, NetworkEngine], Sequence[str]]  # what it returns are notes


def elements_of(inputs: Sequence[Any]) -> int:
    """The number of elements in a call's tensors."""
    return sum(value.numel() for value in inputs if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Failure:
    """Why a piece does not run on its engine, and the nodes to blame where they are known."""

    reason: str
    nodes: tuple[str, ...] = ()
    for_good: bool = False  # the engine itself is at fault: no part of the piece is worth a try
    program: Program | None = None  # one that answers wrongly, or not at all: it can be timed all the same
    case: Case | None = None  # where it does


@dataclass(frozen=True)
class Tried:
    """A program that answers as PyTorch does, and the network it was built from, if it was."""

    program: Program
    network: Network | None
    error: float = (
        0.0  # the largest on any case, as a share of an output's largest value, if it was looked at
    )
    only_full: bool = False  # PyTorch answers calls with an empty tensor


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of a piece, and PyTorch's results for them."""

    module: fx.GraphModule
    inputs: list[Any]
    expected: tuple[Any, ...]
    roundings: dict[float, Rounding] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return elements_of(self.inputs)

    def rounding(self, coarsest: float) -> Rounding:
        """The effect of rounding on the answer; runs are made on demand, and cached."""
        if coarsest not in self.roundings:
            self.roundings[coarsest] = Rounding(self.module, self.inputs, self.expected, coarsest)
        return self.roundings[coarsest]


def try_piece(
    module: fx.GraphModule,
    engine: Engine,
    cases: Sequence[Case],
    rewrite: Rewrite | None,
    limit_s: float | None,
    notes: list[str],
    tolerance: float | None = None,
) -> Tried | Failure:
    """The program of a piece, if it builds and runs in time and answers as PyTorch does; else why not.

    Small cases come first: most wrong answers show there, and the search for the faulty node runs that case
    many times. Whatever an engine or a converter throws concerns this piece alone. With a `tolerance` answers
    may be off by as much, if that is more than what rounding does.
    """
    fresh: list[str] = []
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
        try:
            answers = within(limit_s, f"{engine.name}'s run", partial(tried.program, *case.inputs))
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
    return replace(tried, error=error_of)


def _built(
    module: fx.GraphModule, engine: Engine, rewrite: Rewrite | None, limit_s: float | None, notes: list[str]
) -> Tried:
    if isinstance(engine, GraphEngine):
        return Tried(within(limit_s, f"{engine.name}.build", lambda: engine.build(module)), None)
    assert isinstance(engine, NetworkEngine)
    net = convert(module, name=engine.name, notes=notes, engine=engine)
    if rewrite is not None:
        notes += rewrite(net, engine)
    return Tried(within(limit_s, f"{engine.name}.build", lambda: engine.build(net)), net)


def _fails_on_empty(engine: Engine, net: Network | None) -> str | None:
    if net is None or not isinstance(engine, NetworkEngine):
        return None
    varies = any(not isinstance(size, int) for tensor in net.get_inputs() for size in tensor.shape)
    return engine.fails_on_empty(net) if varies else None


def left_if_empty(engine: str, why: str) -> str:
    """The note of a segment whose calls with an empty tensor PyTorch answers."""
    return f"a segment on {engine} leaves calls without elements to PyTorch: {why}"


def run_in_pytorch(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """PyTorch's answer."""
    with torch.no_grad():
        answer = module(*inputs)
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


class Cases:
    """Cases of a graph's pieces, by example and piece. `whole` has those of the graph itself, if known.

    A piece that is the whole graph shares the graph's answer, and the runs that show what rounding does.
    """

    def __init__(self, module: fx.GraphModule, whole: Sequence[Case | None] = ()) -> None:
        returned: Any = next(iter(reversed(module.graph.nodes))).args[0]
        results = returned if isinstance(returned, list | tuple) else (returned,)
        self._returned = tuple(getattr(node, "name", None) for node in results)
        self._count = len(compute_nodes(module.graph))
        self._whole = whole
        self._known: dict[tuple[int, tuple[str, ...]], Case] = {}

    def of(self, piece: Piece, number: int, values: dict[fx.Node, Any]) -> Case:
        """The case of a piece on example `number`, out of the values known so far; its answers join them."""
        key = (number, contents_of(piece))
        case = self._known.get(key)
        if case is None:
            whole = self._whole[number] if number < len(self._whole) else None
            case = self._known[key] = self._made(piece, values, whole)
        values.update(zip(piece.outputs, case.expected, strict=True))
        return case

    def _made(self, piece: Piece, values: dict[fx.Node, Any], whole: Case | None) -> Case:
        if whole is None or not self._is_whole(piece):
            return case_of(piece, values)
        return Case(piece.module, [values[node] for node in piece.inputs], whole.expected, whole.roundings)

    def _is_whole(self, piece: Piece) -> bool:
        nodes = {*piece.segment.nodes, *piece.segment.recomputed}
        return len(nodes) == self._count and tuple(node.name for node in piece.outputs) == self._returned


def case_of(piece: Piece, values: dict[fx.Node, Any]) -> Case:
    """A piece's inputs out of the values known so far, and PyTorch's answer, which is known from now on."""
    inputs = [values[node] for node in piece.inputs]
    expected = run_in_pytorch(piece.module, inputs)
    values.update(zip(piece.outputs, expected, strict=True))
    return Case(piece.module, inputs, expected)


def contents_of(piece: Piece) -> tuple[str, ...]:
    """A key of everything that the piece's program depends on: equal keys, equal programs."""
    parts = (piece.inputs, piece.segment.nodes, piece.segment.recomputed, piece.outputs)
    return tuple(" ".join(node.name for node in part) for part in parts)


def rewriter(patterns: Patterns, engines: Sequence[Engine], device: str = "cpu") -> Rewrite:
    """Rewrites a network for an engine; names are looked up now, so that a typo is found before anything."""
    network_engines = [engine for engine in engines if isinstance(engine, NetworkEngine)]
    chosen = patterns_by_engine(patterns, network_engines)
    everything = patterns is True or patterns == "all"

    def rewrite(net: Network, engine: NetworkEngine) -> list[str]:
        log = apply(net, engine=engine, patterns=chosen[engine.name], device=device)
        notes = log.failures()
        if everything:  # the user asked for all of them
            for name, reason in log.skipped.items():
                notes.append(f"{engine.name}: pattern {name!r} is left out: {reason}")
            if not engine.patterns():
                notes.append(f"{engine.name}: it supports none of the shipped patterns")
        return notes

    return rewrite
