"""The cost of a stage, or of a node of a graph: seconds of each pass, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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
