"""The walk over a graph that follows the batch from the inputs to the outputs.

A server may join requests to one batch, and a pipeline may divide a batch into micro-batches, only if no row
depends on another row, on its own number or on the number of rows. Running the model cannot prove that, so
the batch is followed through every operator by the operator's rule. An operator without a rule ends the
proof. The graph runs at two batch sizes, since another size may equal one of them by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intarsia.errors import error_text, first_line
from intarsia.graph.nodes import changed_values, memory_of, whereabouts
from intarsia.graph.rows.call import Call, Mixes, Numbers, Reduced, Rows, Summary, Unknown
from intarsia.graph.rows.rules import placement


def mixing(module: fx.GraphModule, calls: Sequence[tuple[int, Sequence[Any]]]) -> str | None:
    """Why rows are not independent, as a clause; None if they are.

    `calls` are the graph's flat inputs at several batch sizes, each with its size. Every tensor among them
    has the batch as its first axis.
    """
    placements: list[dict[fx.Node, Any]] = []
    for size, inputs in calls:
        walk = _Walk(module, module.graph, size)
        try:
            with torch.no_grad():
                walk.run(*inputs)
        except Mixes as error:
            return first_line(error)  # the interpreter adds lines of its own
        except Exception as error:  # a graph that does not run at this size cannot be followed
            return _does_not_run(size, error)
        placements.append(walk.placed)
    for node in module.graph.nodes:
        if any(placed[node] != placements[0][node] for placed in placements[1:]):
            return f"where the batch is depends on its size ({whereabouts(node)})"
    return _outputs(module, placements[0])


def _outputs(module: fx.GraphModule, placed: Mapping[fx.Node, Any]) -> str | None:
    returned: Any = module.graph.output_node().args[0]
    for number, item in enumerate(returned):
        if isinstance(item, fx.Node) and placed[item] != Rows(0):
            return f"output {number} does not have one entry for each row along its first axis"
    return None


@dataclass(frozen=True)
class Doubt:
    """Why the samples of a batch may depend on each other, with the node, and whether that is proved."""

    reason: str
    proved: bool


def doubt_about(
    module: fx.GraphModule,
    graph: fx.Graph,
    calls: Sequence[tuple[int, Sequence[Any]]],
    axes: Mapping[fx.Node, int | None],
) -> Doubt | None:
    """Why the samples of a training graph may depend on each other; None if they do not.

    `axes` are the batch axes of the inputs; other inputs are the same for every micro-batch. A value computed
    from all samples, such as a loss, mixes them only if it is used with a sample again. The statistics of
    batch norm and random numbers do not count. Only shapes matter, so the calls may have fake tensors.
    """
    walks = []
    for size, inputs in calls:
        walk = _TrainingWalk(module, graph, size, axes)
        try:
            with torch.no_grad():
                walk.run(*inputs)
        except Exception as error:
            return Doubt(_does_not_run(size, error), proved=False)
        walks.append(walk)
    doubts = [doubt for walk in walks for doubt in walk.doubts]
    for node in graph.nodes:
        if not doubts and any(walk.placed.get(node) != walks[0].placed.get(node) for walk in walks):
            doubts.append(Doubt(f"where the batch is depends on its size ({whereabouts(node)})", False))
    return next((doubt for doubt in doubts if doubt.proved), next(iter(doubts), None))


def _does_not_run(size: int, error: Exception) -> str:
    return f"the graph does not run at {size} rows ({error_text(error)})"


class _Walk(fx.Interpreter):
    """Runs the graph and records where the batch is in each value."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, size: int) -> None:
        super().__init__(module, graph=graph)
        self._size = size
        self.placed: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.placed[n] = None
        if n.op == "placeholder" and isinstance(value, torch.Tensor):
            self.placed[n] = self._entering(n)
        elif n.op == "call_function":
            self.placed[n] = self._placement(n, value)
        return value

    def _entering(self, node: fx.Node) -> Any:
        return Rows(0)

    def _placement(self, node: fx.Node, value: Any) -> Any:
        try:
            return placement(Call(node, self._size, value, self.env, self.placed))
        except Mixes as error:
            raise Mixes(f"{error} ({whereabouts(node)})") from None


class _TrainingWalk(_Walk):
    """Walks to the end and collects every doubt."""

    def __init__(
        self, module: fx.GraphModule, graph: fx.Graph, size: int, axes: Mapping[fx.Node, int | None]
    ) -> None:
        super().__init__(module, graph, size)
        self._axes = axes
        self.doubts: list[Doubt] = []

    def _entering(self, node: fx.Node) -> Any:
        axis = self._axes.get(node)
        return None if axis is None else Rows(axis)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            for value in n.all_input_nodes:
                if isinstance(self.placed[value], Numbers):
                    self._note(value, "the numbers of rows are returned", proved=True)
        if n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator):
            return self._run_region(n)
        return super().run_node(n)

    def _run_region(self, n: fx.Node) -> Any:
        """Walk a region under `no_grad` or another autocast as the graph around it."""
        bodies = [i for i, a in enumerate(n.args) if isinstance(self.env.get(a), fx.GraphModule)]  # type: ignore[arg-type]
        if not n.target.__name__.startswith("wrap_with") or len(bodies) != 1:  # type: ignore[union-attr]
            return super().run_node(n)
        body, given = self.env[n.args[bodies[0]]], n.args[bodies[0] + 1 :]  # type: ignore[index]
        inner = _TrainingWalk(body, body.graph, self._size, {})
        holders = [node for node in body.graph.nodes if node.op == "placeholder"]
        entering = {h: self.placed.get(a) for h, a in zip(holders, given, strict=True)}  # type: ignore[arg-type]
        inner._entering = entering.get  # type: ignore[method-assign, assignment]
        value = inner.run(*(self.env[a] if isinstance(a, fx.Node) else a for a in given))
        self.doubts += inner.doubts
        results = body.graph.output_node().args[0]
        places = tuple(inner.placed.get(r) for r in results) if isinstance(results, tuple | list) else None
        self.placed[n] = inner.placed.get(results) if places is None else places
        return value

    def _placement(self, node: fx.Node, value: Any) -> Any:
        reads = [self.placed[given] for given in node.all_input_nodes]
        summary = next((where for where in reads if isinstance(where, Summary)), None)
        if summary is not None:
            if not any(isinstance(where, Rows | Numbers) for where in _flat(reads)):
                return self._written(node, _like(value, summary))
            self._note(node, f"{summary.made_by} makes one value of all samples, which is used", proved=True)
            return self._likely(node, value)
        try:
            return placement(Call(node, self._size, value, self.env, self.placed, trains=True))
        except Reduced:
            return self._written(node, _like(value, Summary(whereabouts(node))))
        except Mixes as error:
            self._note(node, str(error), proved=not isinstance(error, Unknown))
            return self._likely(node, value)

    def _note(self, node: fx.Node, reason: str, proved: bool) -> None:
        self.doubts.append(Doubt(f"{reason} ({whereabouts(node)})", proved))

    def _written(self, node: fx.Node, where: Any) -> Any:
        """Record where a value of all samples is written, so that readers of that memory find it."""
        for value in changed_values(node):
            for root in (value, *memory_of(value)):
                if self.placed.get(root) is None:
                    self.placed[root] = where
        return where

    def _likely(self, node: fx.Node, value: Any) -> Any:
        """Where the batch most likely is in the result of an operator without a rule, by its lengths."""
        if isinstance(value, tuple | list):
            return tuple(self._likely(node, item) for item in value)
        if not isinstance(value, torch.Tensor):
            return None
        axes = [i for i, n in enumerate(value.shape) if n and n % self._size == 0]
        exact = [i for i in axes if value.shape[i] == self._size]
        if len(exact) > 1:
            self._note(node, "a tensor with the batch along two axes combines samples", True)
        axis = next(iter(exact or axes), None)
        return (
            Summary(whereabouts(node)) if axis is None else Rows(axis, int(value.shape[axis]) // self._size)
        )


def _like(value: Any, where: Any) -> Any:
    return tuple(where for _ in value) if isinstance(value, tuple | list) else where


def _flat(places: Sequence[Any]) -> list[Any]:
    return [item for p in places for item in (_flat(p) if isinstance(p, list | tuple) else [p])]
