"""Times as in a step.

A node that is measured alone has its inputs in the cache. In a step, other nodes and micro-batches run in
between, and Python and autograd take time between nodes. So the graph also runs as in a step, and the times
of nodes are scaled to add up to the time of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from intarsia.pipeline.cost import Cost, synchronized, total
from intarsia.pipeline.stages.signature import value_name
from intarsia.pipeline.stages.stage import Stage, build_stages
from intarsia.pipeline.stages.trace import Trace

IN_FLIGHT = 2  # micro-batches that run forward before the first runs backward
_LONG = 1.0  # if the first step takes more seconds, one more step is enough


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch, forward and backward."""

    forward: float
    backward: float


def costs_in_step(
    trace: Trace, tensors: Sequence[torch.Tensor], costs: Sequence[Cost], repeats: int, memory: int = 2**30
) -> list[Cost]:
    """The costs of nodes, scaled so that they add up to the time of a step.

    The graph runs in stretches that save at most `memory` bytes (if it can be cut so), one after the other: a
    large model may not fit into memory as a whole. All nodes are scaled by the same factor, so that a slow
    moment of the machine does not change their balance.
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
    """The places between stretches of a graph, each of which saves at most `memory` bytes if possible."""
    places: list[int] = []
    begin = last = 0
    for place in [*trace.line.allowed, len(costs)]:
        if last > begin and _held(costs[begin:place]) > memory:
            places.append(last)
            begin = last
        last = place
    return places


def measure_passes(stage: Stage, values: Sequence[Any], repeats: int) -> tuple[Passes, Sequence[Any]]:
    """The seconds of a stage's passes as in a step, and its outputs.

    Several micro-batches are in flight, and the gradients of weights are accumulated. Aliases of parameters
    and copies of statistics are used, so that the model, its gradients and its hooks do not change. A step
    counts with the mean of its micro-batches; the result is the least of `repeats` steps after a warm-up.
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
            states = {name: _copy(w) if name in form.written else w for name, w in weights.items()}
            with torch.enable_grad():
                gives, took = _run(stage, list(map(_alias, values)), states)
            forward += took
            roots = _growing(gives)
            flying.append((roots, [torch.ones_like(r) for r in roots]))
        for roots, grads in flying:
            begin = synchronized(roots)
            if roots:
                torch.autograd.backward(roots, grads)
            backward += synchronized(roots) - begin
        seconds.append(Passes(forward / IN_FLIGHT, backward / IN_FLIGHT))
    least = Passes(min(s.forward for s in seconds[1:]), min(s.backward for s in seconds[1:]))
    return least, [_alias(v) for v in gives]


def share_apart(trace: Trace, tensors: Sequence[torch.Tensor], costs: Sequence[Cost], repeats: int) -> float:
    """The extra time of a backward pass in two parts, relative to its time in one part.

    torch computes the gradients of inputs first and those of weights later. For that, it searches the graph
    of autograd in Python, and runs some nodes twice. The second half of the graph is measured, whose inputs
    need gradients.
    """
    sums = list(accumulate((c.seconds for c in costs), initial=0.0))
    place = next((at for at in trace.line.allowed if sums[at] >= sums[-1] / 2), None)
    if place is None:
        return 0.0
    first, second = build_stages(trace, [place])
    with torch.no_grad():
        values = [_leaf(v) for v in _run(first, tensors, _own_states(first))[0]]

    def run() -> _Graph:
        states = _own_states(second)
        with torch.enable_grad():
            gives, _ = _run(second, values, states)
        return _Graph(_growing(values), _growing([*states.values()]), _growing(gives))

    whole, apart = _backward_both_ways(run, repeats)
    return max(0.0, apart / (whole or 1.0) - 1.0)


def measure_apart(target: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> float:
    """The extra seconds of the backward pass of one node in two parts."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run() -> _Graph:
        fresh = [_leaf(v) if isinstance(v, torch.Tensor) and v.requires_grad else v for v in leaves]
        learning = [v for v, old in zip(fresh, leaves, strict=True) if isinstance(old, torch.nn.Parameter)]
        inputs = [v for v in _growing(fresh) if not any(v is w for w in learning)]
        again, options = pytree.tree_unflatten(
            [_copy(v) if any(v is i for i in inputs) else v for v in fresh], spec
        )
        with torch.enable_grad():
            return _Graph(inputs, _growing(learning), _growing(pytree.tree_leaves(target(*again, **options))))

    whole, apart = _backward_both_ways(run, repeats)
    return max(0.0, apart - whole)


@dataclass(frozen=True)
class _Graph:
    """The roots of a forward pass, and its leaves that need gradients."""

    inputs: list[torch.Tensor]
    learning: list[torch.Tensor]
    roots: list[torch.Tensor]


def _backward_both_ways(run: Callable[[], _Graph], repeats: int) -> tuple[float, float]:
    """The least seconds of a backward pass in one part, and in two parts; zeros if it has no two parts."""
    parts = _two_parts()
    whole: list[float] = []
    apart: list[float] = []
    for _ in range(repeats + 3):  # a difference of two times needs more repeats than one time
        for seconds, split in ((whole, False), (apart, True)):
            graph = run()
            if parts is None or not (graph.inputs and graph.roots and graph.learning):
                return 0.0, 0.0
            grads = [torch.ones_like(r) for r in graph.roots]
            begin = synchronized(graph.roots)
            if split:
                _, groups = parts[0](graph.roots, grads, graph.inputs, iter(graph.learning))
                parts[1](iter(graph.learning), groups)
            else:
                torch.autograd.backward(graph.roots, grads)
            seconds.append(synchronized(graph.inputs) - begin)
            for value in graph.inputs:
                value.grad = None
    return min(whole[1:]), min(apart[1:])


def _two_parts() -> Any:
    """torch's functions for the two parts of a backward pass, which have no public names; None if missing."""
    try:
        from torch.distributed.pipelining import _backward
    except ImportError:
        return None
    names = ("stage_backward_input", "stage_backward_weight")
    if not all(hasattr(_backward, name) for name in names):
        warnings.warn(
            f"torch {torch.__version__} has no {names[0]}: split backward passes count without extra time",
            stacklevel=2,
        )
        return None
    return _backward.stage_backward_input, _backward.stage_backward_weight


def _run(
    stage: Stage, values: Sequence[Any], states: Mapping[str, torch.Tensor]
) -> tuple[Sequence[Any], float]:
    """The outputs of a stage for these values and states, and the seconds of the run."""
    form = stage.form
    # Copies: the program may change its inputs in place, which autograd refuses for leaves.
    scope = {value_name(s): _copy(v) for s, v in zip(form.takes, values, strict=True)}
    scope.update(states)
    arguments = [scope[name] for name in form.arguments]
    begin = synchronized(arguments)
    results = stage.program(*arguments)
    seconds = synchronized(arguments) - begin
    scope.update(zip(form.results, results, strict=True))
    return [scope[value_name(spec)] for spec in form.gives], seconds


def _own_states(stage: Stage) -> dict[str, torch.Tensor]:
    """Aliases of parameters that are leaves of their own, and copies of other tensors."""
    return {
        name: torch.nn.Parameter(s.detach()) if s.requires_grad else s.clone()
        for name, s in stage.states().items()
    }


def _held(costs: Sequence[Cost]) -> int:
    """The bytes of a stretch: saved activations, and gradients."""
    return IN_FLIGHT * sum(c.saved for c in costs) + sum(c.weights for c in costs)


def _leaf(value: Any) -> Any:
    """The value as a leaf that needs a gradient, if it can have one."""
    return (
        value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, torch.Tensor) else value
    )


def _growing(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]


def _alias(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
