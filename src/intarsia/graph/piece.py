"""Pieces: each segment of a plan as a `GraphModule` that stands alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from intarsia.graph.border import Border, borders
from intarsia.graph.plan import Plan
from intarsia.graph.segment import PYTORCH, Segment
from intarsia.graph.sizes import constant_value


@dataclass(frozen=True, eq=False)
class Piece:
    """A segment as a module: call `module` with the values of `inputs`; it returns those of `outputs` as a
    tuple.

    `inputs` and `outputs` are nodes of the graph of `owner`. `graph` is the graph of the piece.
    """

    segment: Segment
    owner: fx.GraphModule
    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def module(self) -> fx.GraphModule:
        """The piece as a module, built at the first access because that takes most of the time."""
        return fx.GraphModule(self.owner, self.graph)


def extract(gm: fx.GraphModule, plan: Plan, at_hand: Sequence[Iterable[fx.Node]] = ()) -> list[Piece]:
    """Cut every segment of `plan` out of `gm`, in the order they run.

    Weights are shared with `gm`, not copied. If the graph returns a size or a constant, one more piece on
    PyTorch, without nodes, returns it. So every value that the graph returns is one of its inputs, a plain
    constant, or an output of a piece. `at_hand` are tensors of each segment from which it may read a size.
    """
    edges = borders(gm.graph, plan.segments, at_hand)
    pieces = [_piece(gm, segment, border) for segment, border in zip(plan.segments, edges[:-1], strict=True)]
    if epilogue := _epilogue(gm, edges[-1]):
        pieces.append(epilogue)
    return pieces


def _piece(gm: fx.GraphModule, segment: Segment, border: Border) -> Piece:
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in border.inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta = dict(node.meta)

    def local(node: fx.Node) -> Any:
        if node not in copies:
            copies[node] = constant_value(node)
        return copies[node]

    for node in border.local:
        if node in border.sizes:
            tensor, axis = border.sizes[node]
            copy = graph.call_function(torch.ops.aten.sym_size.int, (copies[tensor], axis))
            copy.meta = dict(node.meta)
        else:
            copy = graph.node_copy(node, local)
        copies[node] = copy
    graph.output(tuple(copies[node] for node in border.outputs))
    return Piece(segment, gm, graph, border.inputs, border.outputs)


def _epilogue(gm: fx.GraphModule, border: Border) -> Piece | None:
    returned = dict.fromkeys(next(node for node in gm.graph.nodes if node.op == "output").all_input_nodes)
    outputs = tuple(node for node in border.local if node in returned)
    if not outputs:
        return None
    whole = Border(border.inputs, outputs, border.local, border.sizes)
    return _piece(gm, Segment(PYTORCH, ()), whole)
