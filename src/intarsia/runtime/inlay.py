"""The programs of a graph in the order they run, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from intarsia.engines import Program
from intarsia.graph.piece import Piece
from intarsia.graph.plan import Plan
from intarsia.tracing import is_traced, segment_name, traced


@dataclass(frozen=True)
class Assembly:
    """A graph in pieces: the plan, each piece with its program in the order they run, and plans of bodies."""

    plan: Plan
    pieces: Sequence[Piece]
    programs: Sequence[Program]
    body_plans: Mapping[str, Plan] = field(default_factory=dict)  # of control flow, by the body's name

    def plans_under(self, name: str) -> dict[str, Plan]:
        """The plan by this name, and the plans of bodies by names below it."""
        return {name: self.plan, **{f"{name}/{below}": plan for below, plan in self.body_plans.items()}}


@dataclass(frozen=True)
class Step:
    """One program, the slots it reads, the slots it writes, and those that no later program reads."""

    program: Program
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]


class Inlay(nn.Module):
    """The pieces of one graph as one function, with the inputs and results of the graph."""

    def __init__(self, graph: fx.Graph, assembly: Assembly) -> None:
        super().__init__()
        self.graph: fx.Graph = graph
        self.pieces: tuple[Piece, ...] = tuple(assembly.pieces)
        slots: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                slots[node] = len(slots)
        self._inputs = len(slots)
        borders = []
        for piece in self.pieces:
            reads = tuple(slots[node] for node in piece.inputs)
            for node in piece.outputs:
                slots.setdefault(node, len(slots))
            borders.append((reads, tuple(slots[node] for node in piece.outputs)))
        items: Any = graph.output_node().args[0]
        self._single = not isinstance(items, list | tuple)
        flat = [items] if self._single else list(items)
        # Each result: a slot, or None with a plain value.
        self.returned: tuple[tuple[int, None] | tuple[None, Any], ...] = tuple(
            (slots[item], None) if isinstance(item, fx.Node) else (None, item) for item in flat
        )
        self.steps: tuple[Step, ...] = _steps(borders, assembly.programs, {slot for slot, _ in self.returned})
        self._labels = [segment_name(i, piece.segment.engine) for i, piece in enumerate(self.pieces)]
        self._rest = [None] * (len(slots) - self._inputs)
        # One program with the graph's inputs and results is called directly.
        self.whole: Program | None = None
        if len(self.steps) == 1:
            step = self.steps[0]
            if step.reads == tuple(range(self._inputs)) and step.writes == tuple(s for s, _ in self.returned):
                self.whole = step.program

    def forward(self, *inputs: Any) -> Any:
        results = self.results(inputs)
        return results[0] if self._single else tuple(results)

    def results(self, inputs: Sequence[Any]) -> list[Any]:
        """Everything the graph returns, flat."""
        values: list[Any] = [*inputs, *self._rest]
        traced_call = is_traced()
        for label, step in zip(self._labels, self.steps):  # noqa: B905
            inputs_of_step = [values[slot] for slot in step.reads]
            results = (
                traced(label, "", step.program, *inputs_of_step)
                if traced_call
                else step.program(*inputs_of_step)
            )
            for slot, value in zip(step.writes, results, strict=True):
                values[slot] = value
            for slot in step.frees:
                values[slot] = None
        return [item if slot is None else values[slot] for slot, item in self.returned]


def _steps(
    borders: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    programs: Sequence[Program],
    returned: set[int | None],
) -> tuple[Step, ...]:
    last: dict[int, int] = {}
    for number, (reads, writes) in enumerate(borders):
        last.update(dict.fromkeys((*reads, *writes), number))
    steps = []
    for number, ((reads, writes), program) in enumerate(zip(borders, programs, strict=True)):
        frees = tuple(s for s in dict.fromkeys((*reads, *writes)) if last[s] == number and s not in returned)
        # After the last step, all values are released together, which is faster.
        steps.append(Step(program, reads, writes, frees if number + 1 < len(borders) else ()))
    return tuple(steps)
