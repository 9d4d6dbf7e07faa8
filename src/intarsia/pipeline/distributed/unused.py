"""Parameters that the loss does not depend on get no gradient, as in the plain model.

Every value that crosses a border gets a gradient: zeros if the loss does not use it. With a gradient of
zeros, an optimizer would apply weight decay, which the plain loop does not.

The last rank records which outputs have a gradient, and sends it with the flags at the end of each step. A
flag with every wire would cost a message for each micro-batch and border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from intarsia.pipeline.stages.signature import value_name
from intarsia.pipeline.stages.stage import Stage

_STOPS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}  # gradients do not pass these


class UnusedParameters:
    """Removes the zero gradients of parameters that a loss does not depend on.

    For stages cut along modules, the dependencies are unknown: their zeros stay.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._parts = [stage for stage in stages if isinstance(stage, Stage)]
        self._known = len(self._parts) == len(stages)
        self._reached: dict[tuple[bool, ...], set[int]] = {}

    def forget(self, fresh: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Remove zero gradients that a step gave to parameters which its loss does not use.

        `fresh` are the parameters without a gradient before the step. `used` tells for each output whether
        the loss uses it.
        """
        if all(used) or not self._known:
            return
        reached = self._reached.setdefault(tuple(used), set())
        if not reached:
            reached |= reached_states(self._parts, used)
        for parameter in fresh:
            if id(parameter) not in reached and parameter.grad is not None and not bool(parameter.grad.any()):
                parameter.grad = None


def reached_states(stages: Sequence[Stage], used: Sequence[bool]) -> set[int]:
    """The ids of the parameters and buffers that the used outputs of the last stage depend on."""
    outputs = map(value_name, stages[-1].form.gives)
    needed = {name for name, is_used in zip(outputs, used, strict=True) if is_used}
    reached: set[int] = set()
    for stage in reversed(stages):
        takes, arguments = set(map(value_name, stage.form.takes)), _arguments(stage, needed)
        reached |= {id(state) for name, state in stage.states().items() if name in arguments}
        needed = takes & (arguments | needed)
    return reached


def _arguments(stage: Stage, needed: set[str]) -> set[str]:
    """The arguments of a stage's program that the needed values depend on."""
    nodes, form = list(stage.program.graph.nodes), stage.form
    if any(_writes(node) for node in nodes):  # an alias of the written tensor may be used elsewhere
        return set(form.arguments)
    results = nodes[-1].args[0]
    pairs = zip(results, form.results, strict=True)
    waiting = [node for node, name in pairs if name in needed and isinstance(node, fx.Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        before = [] if node.target in _STOPS else [n for n in node.all_input_nodes if n not in seen]
        seen.update(before)
        waiting += before
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return {name for node, name in zip(placeholders, form.arguments, strict=True) if node in seen}


def _writes(node: fx.Node) -> bool:
    """Whether a node writes in place to a tensor that may have a gradient: any but a buffer."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    target = node.args[0] if node.args else None
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    is_state = isinstance(target, fx.Node) and target.op == "placeholder"
    return not (is_state and isinstance(value, Tensor) and not value.requires_grad)
