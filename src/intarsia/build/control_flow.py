"""Control flow: the bodies of cond, while_loop and scan are models of their own, compiled like one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from intarsia.graph.nodes import is_control_flow


def bodies(module: fx.GraphModule) -> Iterator[tuple[fx.Node, str, fx.GraphModule]]:
    """Each control-flow node of a piece with the name and graph of each of its bodies."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_control_flow(node):
            continue
        for source in node.all_input_nodes:
            body = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                yield node, str(source.target), body


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
    """What each body is called with when the piece runs once; None for a branch that is not taken."""
    found = {name: body for _, name, body in bodies(module)}
    recorders = {name: Recorder(body) for name, body in found.items()}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for name, body in found.items():
            setattr(module, name, body)
    return {name: recorder.seen for name, recorder in recorders.items()}
