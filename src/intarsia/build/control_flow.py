"""Control flow: the bodies of cond, while_loop and scan are compiled like models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from intarsia.build.trial import Case, run_in_pytorch
from intarsia.errors import error_text
from intarsia.graph.nodes import is_control_flow
from intarsia.partition.blocks import IS_WEIGHT


def bodies(module: fx.GraphModule) -> Iterator[tuple[fx.Node, str, fx.GraphModule]]:
    """Each control-flow node of a piece, with the name and graph of each of its bodies."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_control_flow(node):
            continue
        for source in node.all_input_nodes:
            body = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                _mark_weights(node, body)
                yield node, str(source.target), body


def _mark_weights(node: fx.Node, body: fx.GraphModule) -> None:
    """Mark the inputs of a body that are weights. The node's last operands are the body's last inputs."""
    operands: list[Any] = []
    fx.map_arg(node.args, operands.append)
    inputs = [one for one in body.graph.nodes if one.op == "placeholder"]
    for operand, value in zip(reversed(operands), reversed(inputs), strict=False):
        is_weight = operand.op == "get_attr" or operand.meta.get(IS_WEIGHT)
        if is_weight and isinstance(value.meta.get("val"), torch.Tensor):
            value.meta[IS_WEIGHT] = True


class Recorder(nn.Module):
    """Replaces a body during the reference run and records the arguments of its first call."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body
        self.seen: list[Any] | None = None

    def forward(self, *inputs: Any) -> Any:
        if self.seen is None:
            self.seen = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        return self.body(*inputs)


def examples_of(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, list[Any] | None]:
    """The arguments of each body in one run of the piece.

    A branch that does not run has the operands of the branch that does; None if no body of the node runs.
    """
    calls = _calls(module, inputs)
    by_node = {node: calls[name] for node, name, _ in bodies(module) if calls[name] is not None}
    return {name: calls[name] or by_node.get(node) for node, name, _ in bodies(module)}


def _calls(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, list[Any] | None]:
    """The arguments of the first call of each body in one run of the piece; None if it does not run."""
    by_name = {name: body for _, name, body in bodies(module)}
    recorders = {name: Recorder(body) for name, body in by_name.items()}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for name, body in by_name.items():
            setattr(module, name, body)
    return {name: recorder.seen for name, recorder in recorders.items()}


def unverified(key: str, error: Exception | None = None) -> str:
    """The note that a body is not compared with PyTorch; `error` is what it raised on the example."""
    if error is None:
        return f"{key} is not verified: the example does not run it"
    return f"{key} is not verified: the example does not take it; tried, {error_text(error)}"


def other_branches(module: fx.GraphModule, cases: Sequence[Case], notes: list[str]) -> Iterator[Case]:
    """For a piece that an engine runs, cases that take the branches which the examples do not take."""
    inputs_of_graph = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in dict.fromkeys(node for node, _, _ in bodies(module)):
        for case in cases:
            if node.target is not torch.ops.higher_order.cond:
                idle = [name for name, operands in _calls(module, case.inputs).items() if operands is None]
                notes += [unverified(f"{node.name}.{name}") for name in idle]
            elif node.args[0] in inputs_of_graph:
                inputs, place = list(case.inputs), inputs_of_graph.index(node.args[0])
                inputs[place] = ~inputs[place]
                try:
                    yield Case(module, inputs, run_in_pytorch(module, inputs))
                except Exception as error:
                    notes.append(unverified(f"the other branch of {node.name}", error))
