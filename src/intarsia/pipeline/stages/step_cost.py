"""What the passes of a graph take in a training step, where nodes measured alone add up to less.

A node that is measured alone finds its inputs and its memory in the nearest cache; in a step other nodes and
other micro-batches ran in between, and Python and autograd go from node to node. So the graph is also run as
a step runs it, and the seconds of nodes grow by the share that the whole takes more than they.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from intarsia.pipeline.cost import Cost, total
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.pipeline.stages.stage import Stage, build_stages
from intarsia.pipeline.stages.trace import Trace

IN_FLIGHT = 2  # micro-batches that go forward before the first goes back
_LONG = 1.0  # seconds of a step after which one more is enough


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch, forward and backward."""

    forward: float
    backward: float


def costs_in_step(
    trace: Trace, tensors: Sequence[torch.Tensor], costs: Sequence[Cost], repeats: int, memory: int = 2**30
) -> list[Cost]:
    """The costs of nodes, grown so that they add up to what a step takes.

    The graph runs in stretches that keep at most `memory` bytes (or as little as the graph can be cut into),
    one after the other: a model that is cut because it is large need not fit in one step. All nodes grow by
    the same share, so that a moment in which the machine is slow does not move the balance between them.
    """
    forward = backward = 0.0
    values: Sequence[Any] = tensors
    for stage in build_stages(trace, stretches(trace, costs, memory)):
        passes, values = measure_passes(stage, values, repeats)
        forward += passes.forward
        backward += passes.backward
    whole = total(costs)
    ahead = forward / whole.forward if whole.forward else 1.0
    back = backward / whole.backward if whole.backward else 1.0
    return [
        replace(
            c,
            forward=c.forward * ahead,
            backward_input=c.backward_input * back,
            backward_weight=c.backward_weight * back,
        )
        for c in costs
    ]


def stretches(trace: Trace, costs: Sequence[Cost], memory: int) -> list[int]:
    """The places between stretches of a graph; each keeps at most `memory` bytes if it can."""
    places: list[int] = []
    begin = last = 0
    for place in [*trace.line.allowed, len(costs)]:
        if last > begin and _held(costs[begin:place]) > memory:
            places.append(last)
            begin = last
        last = place
    return places


def measure_passes(stage: Stage, values: Sequence[Any], repeats: int) -> tuple[Passes, Sequence[Any]]:
    """The seconds of a stage's passes as in a step, and what it gives.

    Some micro-batches are in flight and the gradients of weights are added up, on aliases of the parameters
    and copies of the statistics: the model's own, its gradients and its hooks are left alone. The mean of a
    step's micro-batches counts, the least of `repeats` steps after one to warm up.
    """
    form = stage.form
    weights = {name: _alias(state) for name, state in stage.states().items()}
    seconds: list[Passes] = []
    gives: Sequence[Any] = ()
    for turn in range(repeats + 1):
        if turn > 1 and seconds[0].forward + seconds[0].backward > _LONG:
            break
        forward = backward = 0.0
        flying = []
        for _ in range(IN_FLIGHT):
            # Copies: the program may change what it takes in place, which autograd forbids to a leaf.
            known = {_name(s): _copy(v) for s, v in zip(form.takes, map(_alias, values), strict=True)}
            known |= {name: _copy(w) if name in form.written else w for name, w in weights.items()}
            arguments = [known[name] for name in form.arguments]
            begin = synchronized(arguments)
            with torch.enable_grad():
                made = stage.program(*arguments)
            forward += synchronized(arguments) - begin
            known.update(zip(form.results, made, strict=True))
            gives = [known[_name(spec)] for spec in form.gives]
            roots = [v for v in gives if isinstance(v, torch.Tensor) and v.requires_grad]
            flying.append((roots, [torch.ones_like(r) for r in roots]))
        for roots, grads in flying:
            begin = synchronized(roots)
            if roots:
                torch.autograd.backward(roots, grads)
            backward += synchronized(roots) - begin
        seconds.append(Passes(forward / IN_FLIGHT, backward / IN_FLIGHT))
    least = Passes(min(s.forward for s in seconds[1:]), min(s.backward for s in seconds[1:]))
    return least, [_alias(v) for v in gives]


def synchronized(values: Sequence[Any]) -> float:
    """The time, when the device of these values has done what it was given."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
            break
    return time.perf_counter()


def _held(costs: Sequence[Cost]) -> int:
    """Bytes of a stretch: what waits for backward, and gradients."""
    return IN_FLIGHT * sum(c.saved for c in costs) + sum(c.weights for c in costs)


def _name(spec: TensorSpec | str) -> str:
    return spec if isinstance(spec, str) else spec.name


def _alias(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
