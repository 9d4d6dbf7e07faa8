"""The walk over a graph that follows the batch from the inputs to the outputs.

A server may join requests to one batch, and a pipeline may divide a batch into micro-batches, only if no row
depends on another row, on its own number or on the number of rows. Running the model cannot prove that, so
the batch is followed through every operator by the operator's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.errors import error_text
from intarsia.graph.nodes import bodies_of, changed_values, memory_of, whereabouts
from intarsia.graph.rows.call import Call, Mixes, Numbers, Reduced, Rows, Summary, Unknown, flat, grown_axes
from intarsia.graph.rows.rules import placement

Calls = Sequence[tuple[int, Sequence[Any]]]
"""The flat inputs of a graph at two batch sizes, each with its size. Only shapes matter."""


@dataclass(frozen=True)
class Doubt:
    """Why the rows of a batch may depend on each other, with the node, and whether that is proved."""

    reason: str
    proved: bool


def mixing(module: fx.GraphModule, calls: Calls) -> str | None:
    """Why the rows of a graph are not independent, as a clause; None if they are.

    Every tensor among the inputs has the batch as its first axis.
    """
    tensors = zip(module.graph.find_nodes(op="placeholder"), calls[0][1], strict=True)
    entering = {node: Rows(0) for node, value in tensors if isinstance(value, torch.Tensor)}
    walk = _walked(module, module.graph, calls, entering, trains=False)
    if walk.doubts:
        return walk.doubts[0].reason
    returned: Any = module.graph.output_node().args[0]
    for number, item in enumerate(returned):
        if isinstance(item, fx.Node) and walk.placed[item] != Rows(0):
            return f"output {number} does not have one entry for each row along its first axis"
    return None


def doubt_about(
    module: fx.GraphModule, graph: fx.Graph, calls: Calls, axes: Mapping[fx.Node, int | None]
) -> Doubt | None:
    """Why the samples of a training graph may depend on each other; None if they do not.

    `axes` are the batch axes of the inputs; other inputs are the same for every micro-batch. A value computed
    from all samples, such as a loss, mixes them only if it is used with a sample again. The statistics of
    batch norm and random numbers do not count.
    """
    entering = {node: Rows(axis) for node, axis in axes.items() if axis is not None}
    doubts = _walked(module, graph, calls, entering, trains=True).doubts
    return next((doubt for doubt in doubts if doubt.proved), next(iter(doubts), None))


def _walked(
    module: fx.GraphModule, graph: fx.Graph, calls: Calls, entering: Mapping[fx.Node, Any], trains: bool
) -> _Walk:
    walk = _Walk([size for size, _ in calls], [], trains)
    for size, inputs in calls:
        walk.values.append({})
        try:
            with torch.no_grad():
                _Recorder(module, graph, walk.values[-1]).run(*inputs)
        except Exception as error:  # a graph that does not run at this size cannot be followed
            walk.doubts = [
                Doubt(f"the graph does not run at {size} rows ({error_text(error)})", proved=False)
            ]
            return walk
    walk.follow(graph, entering.get)
    return walk


class _Recorder(fx.Interpreter):
    """Runs a graph, and records the value of each node, also in regions; tensors on the meta device."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
        super().__init__(module, graph=graph)
        self.values = values

    def run_node(self, n: fx.Node) -> Any:
        body = _region(n)
        if body is None:
            value = super().run_node(n)
        else:
            values = [self.env[a] if isinstance(a, fx.Node) else a for a in _operands(n)]
            value = _Recorder(body, body.graph, self.values).run(*values)
        self.values[n] = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), value)
        return value


def _region(node: fx.Node) -> fx.GraphModule | None:
    """The body of a region under `no_grad` or another autocast, which the graph around it runs once."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    bodies = bodies_of(node)
    return bodies[0] if node.target.__name__.startswith("wrap_with") and len(bodies) == 1 else None


class _Walk:
    """Records where the batch is in each value, and the doubts on the way."""

    def __init__(self, sizes: Sequence[int], values: list[dict[fx.Node, Any]], trains: bool) -> None:
        self.sizes, self.values, self.trains = sizes, values, trains
        self.placed: dict[fx.Node, Any] = {}
        self.doubts: list[Doubt] = []

    def follow(self, graph: fx.Graph, entering: Callable[[fx.Node], Any]) -> None:
        """Follow the batch through a graph, from where it is in the placeholders."""
        for node in graph.nodes:
            body = _region(node)
            if node.op == "placeholder":
                self.placed[node] = entering(node)
            elif node.op != "call_function":
                self.placed[node] = None
            elif body is None:
                self.placed[node] = self._placement(node)
            else:
                holders = body.graph.find_nodes(op="placeholder")
                self.follow(
                    body.graph, dict(zip(holders, map(self._placed, _operands(node)), strict=True)).get
                )
                results: Any = body.graph.output_node().args[0]
                several = isinstance(results, tuple | list)
                self.placed[node] = tuple(map(self._placed, results)) if several else self._placed(results)
            if node.op == "output" and any(isinstance(self.placed[v], Numbers) for v in node.all_input_nodes):
                self._note(node, "the numbers of rows are returned", proved=True)

    def _placed(self, value: Any) -> Any:
        return self.placed[value] if isinstance(value, fx.Node) else None

    def _placement(self, node: fx.Node) -> Any:
        reads = [self.placed[source] for source in node.all_input_nodes]
        summary = next((where for where in reads if isinstance(where, Summary)), None)
        if summary is not None:
            if not any(isinstance(where, Rows | Numbers) for where in flat(reads)):
                return self._written(node, summary)
            self._note(node, f"{summary.made_by} makes one value of all samples, which is used", proved=True)
            return self._likely(node)
        try:
            return placement(Call(node, self.sizes, self.values, self.placed, self.trains))
        except Mixes as error:
            if isinstance(error, Reduced) and self.trains:
                return self._written(node, Summary(whereabouts(node)))
            self._note(node, str(error), proved=not isinstance(error, Unknown))
            return self._likely(node)

    def _note(self, node: fx.Node, reason: str, proved: bool) -> None:
        self.doubts.append(Doubt(f"{reason} ({whereabouts(node)})", proved))

    def _written(self, node: fx.Node, where: Any) -> Any:
        """Record where a value of all samples is written, so that readers of that memory find it."""
        for value in changed_values(node):
            for root in (value, *memory_of(value)):
                if self.placed.get(root) is None:
                    self.placed[root] = where
        value = self.values[0][node]
        return tuple(where for _ in value) if isinstance(value, tuple | list) else where

    def _likely(self, node: fx.Node) -> Any:
        """Where the batch most likely is in the result of an operator without a rule."""
        columns = [at_size[node] for at_size in self.values]
        if isinstance(columns[0], tuple | list):
            return tuple(self._likely_axis(node, column) for column in zip(*columns, strict=False))
        return self._likely_axis(node, columns)

    def _likely_axis(self, node: fx.Node, values: Sequence[Any]) -> Any:
        if not isinstance(values[0], torch.Tensor) or values[0].dim() != values[1].dim():
            return None
        axes = grown_axes(values)
        if len(axes) > 1:
            self._note(node, "a tensor with the batch along two axes combines samples", proved=True)
        return (
            Rows(axes[0], values[0].shape[axes[0]] // self.sizes[0]) if axes else Summary(whereabouts(node))
        )


def _operands(node: fx.Node) -> list[Any]:
    """The arguments of a region, after its body."""
    after = 1 + next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    return list(node.args[after:])
