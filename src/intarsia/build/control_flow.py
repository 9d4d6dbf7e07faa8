"""Control flow: the bodies of cond, while_loop and scan are models of their own, compiled like one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from intarsia.graph.nodes import is_control_flow
from intarsia.partition.blocks import IS_WEIGHT


def bodies(module: fx.GraphModule) -> Iterator[tuple[fx.Node, str, fx.GraphModule]]:
    """Each control-flow node of a piece with the name and graph of each of its bodies."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_control_flow(node):
            continue
        for source in node.all_input_nodes:
            body = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                _mark_weights(node, body)
                yield node, str(source.target), body


def _mark_weights(node: fx.Node, body: fx.GraphModule) -> None:
    """Weights are given to bodies as operands, the last of which are the last inputs of a body."""
    operands: list[Any] = []
    fx.map_arg(node.args, operands.append)
    inputs = [one for one in body.graph.nodes if one.op == "placeholder"]
    for operand, taken in zip(reversed(operands), reversed(inputs), strict=False):
        is_weight = operand.op == "get_attr" or operand.meta.get(IS_WEIGHT)
        if is_weight and isinstance(taken.meta.get("val"), torch.Tensor):
            taken.meta[IS_WEIGHT] = True


class Recorder(nn.Module):
    """Stands in for a body during the reference run and keeps what it is first called with."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body
        self.seen: list[Any] | None = None

    def forward(self, *inputs: Any) -> Any:
        if self.seen is None:
            self.seen = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        return self.body(*inputs)


def examples_of(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, list[Any] | None]:
    """What each body is called with when the piece runs once.

    A branch that is not taken has the operands of the one that is; None where no body of a node runs.
    """
    places = [(node, name, body) for node, name, body in bodies(module)]
    by_name = {name: body for _, name, body in places}
    recorders = {name: Recorder(body) for name, body in by_name.items()}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for name, body in by_name.items():
            setattr(module, name, body)
    seen = {node: recorders[name].seen for node, name, _ in places if recorders[name].seen is not None}
    return {name: recorders[name].seen or seen.get(node) for node, name, _ in places}
