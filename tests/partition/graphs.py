"""Graphs for partition tests: the lgamma example, and small builders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from intarsia.graph.nodes import compute_nodes, op_name
from intarsia.lower.decompositions import decomposition_table
from intarsia.lower.lowering import decomposed
from intarsia.partition import Piece, SupportTable

REASON = "no converter"


class Lgamma(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        add = x + y
        x_lgamma = torch.lgamma(x)
        mul = x * y
        y_lgamma = torch.lgamma(y)
        div = x / y
        div_lgamma = torch.lgamma(div)
        return torch.cat([x_lgamma, y_lgamma, div_lgamma, add, mul], 0)


def lower(model: nn.Module, args: tuple[object, ...], **kwargs: object) -> fx.GraphModule:
    """Export to functional core ATen with weights as attributes, as the partitioner gets it."""
    program = decomposed(torch.export.export(model.eval(), args, **kwargs), decomposition_table())
    gm = program.module()
    gm = fx.GraphModule(gm, gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and "guard" in str(node.target):
            gm.graph.erase_node(node)
    # `program.module()` keeps the user's pytree at the output and drops some values; both are simple here.
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return gm


def refuse(gm: fx.GraphModule, *ops: str, engines: tuple[str, ...] = ("a", "pytorch")) -> SupportTable:
    """A table where every engine but PyTorch refuses nodes whose op name contains one of `ops`."""
    return table_by(
        gm, lambda node: "pytorch" if any(op in op_name(node) for op in ops) else engines[0], engines
    )


def table_by(
    gm: fx.GraphModule, engine_of: Callable[[fx.Node], str], engines: tuple[str, ...]
) -> SupportTable:
    """A table under which `engine_of(node)` is every node's first accepting engine."""
    refusals = {}
    for node in compute_nodes(gm.graph):
        before = engines[: engines.index(engine_of(node))]
        if before:
            refusals[node] = dict.fromkeys(before, REASON)
    return SupportTable(engines, refusals)


def run_pieces(gm: fx.GraphModule, pieces: list[Piece], args: tuple[object, ...]) -> list[object]:
    """Run the pieces one after another in plain PyTorch; what the graph returns, flat."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, object] = dict(zip(inputs, args, strict=True))
    for piece in pieces:
        results = piece.module(*(values[node] for node in piece.inputs))
        assert isinstance(results, tuple) and len(results) == len(piece.outputs)
        values.update(zip(piece.outputs, results, strict=True))
    output = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    flat = output if isinstance(output, (list, tuple)) else [output]
    return [values[item] if isinstance(item, fx.Node) else item for item in flat]


def equal(left: object, right: object) -> bool:
    """True when both are the same tensor values, or the same plain values."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)
