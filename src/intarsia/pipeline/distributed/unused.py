"""Parameters that the loss does not depend on get no gradient, as in the plain model.

Every value that crosses a border gets a gradient back, zeros where the loss does not use it. An optimizer
would take zeros for a gradient, and let weights decay that the plain loop leaves alone.

The last rank notes at which outputs the backward pass began, and the flags that every step shares anyway
carry it. A flag with every wire would cost a message for each micro-batch and border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from intarsia.pipeline.stages.signature import value_name
from intarsia.pipeline.stages.stage import Stage

_STOPS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}  # no gradient goes through


class UnusedParameters:
    """Finds the parameters that a loss does not depend on, once for each set of outputs that it uses.

    Of stages that are cut along the module tree it is not known what depends on what: zeros stay there.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        self._parts = [stage for stage in stages if isinstance(stage, Stage)]
        self._known = len(self._parts) == len(stages)
        self._reached: dict[tuple[bool, ...], set[int]] = {}

    def forget(self, fresh: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Take the zeros from parameters that had no gradient before a step, and that its loss does not use.

        `used` says of each output whether any part of the loss is made of it.
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
    """The identities of the parameters and buffers that the used outputs of the last stage are made of."""
    needed = {name for name, one in zip(map(value_name, stages[-1].form.gives), used, strict=True) if one}
    reached: set[int] = set()
    for stage in reversed(stages):
        takes, arguments = set(map(value_name, stage.form.takes)), _arguments(stage, needed)
        reached |= {id(state) for name, state in stage.states().items() if name in arguments}
        needed = takes & (arguments | needed)
    return reached


def _arguments(stage: Stage, needed: set[str]) -> set[str]:
    """The arguments of a stage's program that the needed values are made of."""
    nodes, form = list(stage.program.graph.nodes), stage.form
    if any(_writes(node) for node in nodes):  # another name of what is written may lead elsewhere
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
    holders = [node for node in nodes if node.op == "placeholder"]
    return {name for node, name in zip(holders, form.arguments, strict=True) if node in seen}


def _writes(node: fx.Node) -> bool:
    """Whether a node writes in place to what gradients go through: anything but a buffer's statistics."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    target = node.args[0] if node.args else None
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    is_state = isinstance(target, fx.Node) and target.op == "placeholder"
    return not (is_state and isinstance(value, Tensor) and not value.requires_grad)
