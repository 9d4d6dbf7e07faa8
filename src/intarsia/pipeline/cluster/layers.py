"""A model as a line of layers: what each costs for any size of micro-batch, and the stages cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from intarsia.errors import PartitionError
from intarsia.pipeline.balance.blockpartition import even_cuts, prefix_sums, smallest_bottleneck
from intarsia.pipeline.cost import Cost

Vector = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class LayerLine:
    """Costs by layer; the seconds of a pass grow with the samples of a micro-batch from a fixed part on.

    Rows of `fixed` and `each` are the forward pass and the gradients of inputs and of weights.
    """

    fixed: Vector  # 3 x layers: seconds whatever the size
    each: Vector  # 3 x layers: seconds more for each sample
    saved: Vector  # bytes kept for backward, a sample
    weights: Vector  # bytes of parameters and buffers
    crossing: Vector  # bytes that cross behind each layer, a sample; the last entry means nothing

    def __len__(self) -> int:
        return len(self.weights)

    @staticmethod
    def measured(
        runs: Sequence[tuple[int, Sequence[Cost]]], crossing: Sequence[float], saved: Sequence[float]
    ) -> LayerLine:
        """The line of costs measured with one or two sizes of micro-batch; between them costs are a line.

        >>> line = LayerLine.measured([(1, [Cost(2.0)]), (4, [Cost(5.0)])], [0.0], [0.0])
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
        return LayerLine(fixed, each, np.asarray(saved, float), weights, np.asarray(crossing, float))

    def seconds(self, samples: int, speed: float = 1.0) -> Vector:
        """3 x layers: the seconds of a micro-batch of so many samples."""
        found: Vector = (self.fixed + self.each * samples) / speed
        return found

    def cuts(self, weights: Vector, stages: int) -> tuple[int, ...]:
        """Where to cut so that the heaviest of so many stages is as light as can be."""
        sums = prefix_sums(weights.tolist())
        return tuple(even_cuts(sums, stages, smallest_bottleneck(sums, stages))[1:-1])


@dataclass(frozen=True)
class StageTable:
    """Costs by stage for one size of micro-batch."""

    seconds: Vector  # 3 x stages
    saved: Vector
    weights: Vector
    borders: Vector  # bytes that cross behind each stage but the last
    handover: float = 0.0  # seconds of each forward pass and of each backward pass beside computing

    @staticmethod
    def of(
        line: LayerLine, cuts: Sequence[int], samples: int, speed: float = 1.0, handover: float = 0.0
    ) -> StageTable:
        """The stages between cuts."""
        starts = [0, *cuts]
        seconds = np.add.reduceat(line.seconds(samples, speed), starts, axis=1)
        # Nobody asks the first stage for a gradient of inputs: all of its backward pass is the weights'.
        seconds[1:, 0] = 0.0, seconds[1:, 0].sum()
        return StageTable(
            seconds,
            np.add.reduceat(line.saved * samples, starts),
            np.add.reduceat(line.weights, starts),
            line.crossing[np.array(cuts, int) - 1] * samples,
            handover,
        )

    def work(self, recompute: bool) -> Vector:
        """The seconds of both passes of a stage on a micro-batch."""
        both: Vector = self.seconds.sum(axis=0) + 2 * self.handover
        return both + self.seconds[0] if recompute else both


def _seconds(costs: Sequence[Cost]) -> Vector:
    return np.array(
        [
            [c.forward for c in costs],
            [c.backward_input for c in costs],
            [c.backward_weight for c in costs],
        ]
    )


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
            )
        )
    return found
