"""A model as a line of layers, as arrays: what searching a cluster for the best cuts takes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from intarsia.errors import PartitionError
from intarsia.pipeline.balance.blockpartition import even_cuts, prefix_sums, smallest_bottleneck
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.simulate import StageTable, Vector


@dataclass(frozen=True)
class LayerLine:
    """Costs by layer; the seconds of a pass grow with the samples of a micro-batch from a fixed part on.

    Rows of `fixed` and `each` are those of `StageTable.seconds`: the forward pass, the gradients of inputs
    and of weights, and what these take longer apart.
    """

    fixed: Vector  # 4 x layers: seconds whatever the size
    each: Vector  # 4 x layers: seconds more for each sample
    saved: Vector  # bytes kept for backward, a sample
    weights: Vector  # bytes of parameters and buffers
    crossing: Vector  # bytes that cross behind each layer, a sample; the last entry means nothing
    measured: dict[int, Vector] = field(default_factory=dict)  # seconds by samples, where they are known

    def __len__(self) -> int:
        return len(self.weights)

    @staticmethod
    def of(
        runs: Sequence[tuple[int, Sequence[Cost]]], crossing: Sequence[float], saved: Sequence[float]
    ) -> LayerLine:
        """The line of costs measured with one size of micro-batch or more; beyond those they are a line.

        >>> line = LayerLine.of([(1, [Cost(2.0)]), (4, [Cost(5.0)])], [0.0], [0.0])
        >>> float(line.seconds(8)[0, 0])
        9.0
        """
        if not runs:
            raise PartitionError(
                "a line of layers needs costs measured with one size of micro-batch at least"
            )
        (small, first), (large, last) = runs[0], runs[-1]
        low, high = _seconds(first), _seconds(last)
        if large > small:
            # Noise may make the larger micro-batch the faster one; time never falls with size.
            each = np.maximum(0.0, (high - low) / (large - small))
            fixed = np.maximum(0.0, low - each * small)
            each = np.where(fixed > 0, each, high / large)
        else:
            fixed, each = np.zeros_like(low), low / small
        weights = np.array([float(c.weights) for c in first])
        between = {samples: _seconds(costs) for samples, costs in runs[1:-1]}
        return LayerLine(fixed, each, np.asarray(saved, float), weights, np.asarray(crossing, float), between)

    def seconds(self, samples: int, speed: float = 1.0) -> Vector:
        """4 x layers: the seconds of a micro-batch of so many samples."""
        known = self.measured.get(samples)
        found: Vector = (self.fixed + self.each * samples if known is None else known) / speed
        return found

    def cuts(self, weights: Vector, stages: int) -> tuple[int, ...]:
        """Where to cut so that the heaviest of so many stages is as light as can be."""
        sums = prefix_sums(weights.tolist())
        return tuple(even_cuts(sums, stages, smallest_bottleneck(sums, stages))[1:-1])

    def stages(
        self, cuts: Sequence[int], samples: int, speed: float = 1.0, handover: float = 0.0
    ) -> StageTable:
        """The stages between cuts, for micro-batches of so many samples."""
        starts = [0, *cuts]
        seconds = np.add.reduceat(self.seconds(samples, speed), starts, axis=1)
        # Nobody asks the first stage for a gradient of inputs: all of its backward pass is the weights'.
        seconds[1:, 0] = 0.0, seconds[1:3, 0].sum(), 0.0
        return StageTable(
            seconds,
            np.add.reduceat(self.saved * samples, starts),
            np.add.reduceat(self.weights, starts),
            self.crossing[np.array(cuts, int) - 1] * samples,
            handover,
        )


def _seconds(costs: Sequence[Cost]) -> Vector:
    rows = [[c.forward, c.backward_input, c.backward_weight, c.apart] for c in costs]
    return np.array(rows, float).T.reshape(4, len(costs))


def merge(costs: Sequence[Cost], places: Sequence[int]) -> list[Cost]:
    """Costs of nodes summed between places: the layers of a line whose nodes are too many or may not part."""
    sums = list(accumulate(costs, initial=Cost()))
    bounds = [0, *places, len(costs)]
    found = []
    for a, b in pairwise(bounds):
        x, y = sums[a], sums[b]
        found.append(
            Cost(
                max(0.0, y.forward - x.forward),
                max(0.0, y.backward_input - x.backward_input),
                max(0.0, y.backward_weight - x.backward_weight),
                y.saved - x.saved,
                y.weights - x.weights,
                max(0.0, y.apart - x.apart),
            )
        )
    return found
