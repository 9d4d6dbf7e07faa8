"""What pieces are given and answer in PyTorch, on every example; what is known is not run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from intarsia.build.trial import Case, run_in_pytorch
from intarsia.graph.nodes import compute_nodes
from intarsia.graph.piece import Piece


class Cases:
    """Cases of a graph's pieces, by example and piece. `whole` has those of the graph itself, if known.

    A piece that is the whole graph shares the graph's answer, and the runs that show what rounding does.
    """

    def __init__(self, module: fx.GraphModule, whole: Sequence[Case | None] = ()) -> None:
        returned: Any = next(iter(reversed(module.graph.nodes))).args[0]
        given = returned if isinstance(returned, list | tuple) else (returned,)
        self._returned = tuple(getattr(node, "name", None) for node in given)
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
    """What a program made of the piece depends on: equal contents, equal program."""
    parts = (piece.inputs, piece.segment.nodes, piece.segment.recomputed, piece.outputs)
    return tuple(" ".join(node.name for node in part) for part in parts)
