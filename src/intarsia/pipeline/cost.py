"""The cost of a stage, of a layer or of a node of a graph: seconds of each pass, and bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Cost:
    """Seconds for the forward pass and for the gradients of inputs and of weights; bytes of memory.

    >>> Cost(1.0, 2.0, 1.0) + Cost(0.5, 0.0, 0.0, saved=8)
    Cost(forward=1.5, backward_input=2.0, backward_weight=1.0, saved=8, weights=0, apart=0.0)
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    saved: int = 0  # bytes one micro-batch keeps from its forward to its backward pass
    weights: int = 0  # bytes of parameters and buffers
    apart: float = 0.0  # extra seconds if the gradients of inputs and of weights are computed separately

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.saved + other.saved,
            self.weights + other.weights,
            self.apart + other.apart,
        )

    def first(self) -> Cost:
        """The cost as the first stage of a pipeline, whose inputs need no gradient.

        All of its backward pass counts as the gradient of the weights, which some schedules run later.

        >>> Cost(1.0, 2.0, 1.0, apart=0.5).first().backward_weight
        3.0
        """
        return replace(self, backward_input=0.0, backward_weight=self.backward, apart=0.0)

    @property
    def backward(self) -> float:
        """Seconds for the whole backward pass."""
        return self.backward_input + self.backward_weight

    @property
    def seconds(self) -> float:
        """Seconds for both passes."""
        return self.forward + self.backward


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of costs."""
    return sum(costs, Cost())


def measure_node(
    target: Callable[..., Any],
    args: Any,
    kwargs: Any,
    repeats: int,
    held: Sequence[torch.nn.Parameter] = (),
    budget: float = 0.0,
) -> Cost:
    """The cost of one node or module that runs alone, forward and backward, on copies of its inputs.

    It runs once to warm up, `repeats` times, and on until `budget` seconds are over; the least times count.
    `held` are the parameters of a target besides its arguments, such as those of a module. The cost includes
    the addition of a weight's gradient to that of earlier micro-batches.
    """
    learning = [weight for weight in held if weight.requires_grad]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    grown = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    weights = {i for i in grown if isinstance(leaves[i], torch.nn.Parameter)}
    forward: list[float] = []
    inputs: list[float] = []
    whole: list[float] = []
    added: list[float] = []
    while len(forward) <= repeats or sum(map(sum, (forward, inputs, whole))) < budget:
        # Copies, so that a node that works in place gets the same values each time.
        fresh = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        for i in grown:
            fresh[i].requires_grad_(isinstance(leaves[i], torch.nn.Parameter) or leaves[i].requires_grad)
        differentiable = [i for i in grown if fresh[i].requires_grad]
        # Autograd refuses in-place changes of leaves, so the node gets clones of them.
        seen = [v.clone() if i in differentiable and i not in weights else v for i, v in enumerate(fresh)]
        again, options = pytree.tree_unflatten(seen, spec)
        begin = synchronized(fresh)
        with torch.enable_grad():
            value = target(*again, **options)
        forward.append(synchronized(fresh) - begin)
        roots = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor) and v.requires_grad]
        if roots and (differentiable or learning):
            grads = [torch.ones_like(r) for r in roots]
            inputs.append(_time_grad(roots, [fresh[i] for i in differentiable if i not in weights], grads))
            whole.append(_time_grad(roots, [*(fresh[i] for i in differentiable), *learning], grads))
            added.append(_time_adding([*(fresh[i] for i in differentiable if i in weights), *learning]))
    through = min(inputs[1:], default=0.0)
    of_weights = max(0.0, min(whole[1:], default=0.0) - through) + min(added[1:], default=0.0)
    return Cost(min(forward[1:]), through, of_weights)


def _time_grad(roots: list[torch.Tensor], leaves: list[torch.Tensor], grads: list[torch.Tensor]) -> float:
    if not leaves:
        return 0.0
    begin = synchronized(leaves)
    torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
    return synchronized(leaves) - begin


def _time_adding(weights: list[torch.Tensor]) -> float:
    sums = [torch.zeros_like(weight) for weight in weights]
    begin = synchronized(weights)
    for gradient, weight in zip(sums, weights, strict=True):
        gradient.add_(weight.detach())
    return synchronized(weights) - begin


def synchronized(values: Sequence[Any]) -> float:
    """The time after the device of these values has finished its work."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
            break
    return time.perf_counter()
