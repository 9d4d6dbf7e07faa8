"""Exact solvers of the balance problem: for plain costs, and with memory, speeds and prices of cuts.

There are two: the solver for plain costs takes 0.1 ms for 24 layers on 4 stages, the other 30 ms, and the
planner needs thousands of balances. The first is also exact for floats of any size, whose squares would
overflow in the other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, float)


def solve(sequence: Sequence[Number], partitions: int = 1) -> list[list[Number]]:
    """Cut a sequence into non-empty blocks so that the largest sum is minimal.

    If several cuts have the same largest sum, the blocks are as even as possible from the left. Floats are
    compared exactly, without rounding.

    >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
    [[1, 2, 3, 4], [5, 6]]
    """
    if partitions < 1:
        raise ValueError(f"the number of partitions must be positive, got {partitions}")
    if len(sequence) < partitions:
        raise ValueError(f"{len(sequence)} elements cannot fill {partitions} partitions")
    sums = prefix_sums(sequence)
    cuts = even_cuts(sums, partitions, smallest_bottleneck(sums, partitions))
    return [list(sequence[a:b]) for a, b in pairwise(cuts)]


def prefix_sums(sequence: Sequence[int | float]) -> list[int]:
    """The sums of all prefixes, scaled to integers so that they are exact."""
    wrong = [x for x in sequence if not (math.isfinite(x) and x >= 0)]
    if wrong:
        raise ValueError(f"costs must be finite and not negative, got {wrong[0]}")
    if all(isinstance(x, Integral) for x in sequence):
        return [0, *accumulate(int(x) for x in sequence)]
    # A float is an integer over a power of two, so all denominators divide the largest.
    ratios = [float(x).as_integer_ratio() for x in sequence]
    scale = max(denominator for _, denominator in ratios)
    return [0, *accumulate(numerator * (scale // denominator) for numerator, denominator in ratios)]


def smallest_bottleneck(sums: list[int], partitions: int) -> int:
    """The smallest cap such that `partitions` blocks under the cap cover the sequence.

    A bisection over caps in which each probe moves a bound to a sum that occurs. If a cap is enough, the
    upper bound becomes the largest block under it. If not, the lower bound becomes the smallest cap that
    makes some block longer.
    """
    total, count = sums[-1], len(sums) - 1
    largest = max(sums[i + 1] - sums[i] for i in range(count))
    low = max(largest, -(-total // partitions))
    high = -(-total // partitions) + largest  # greedy blocks always fit under this cap
    while low < high:
        cap = (low + high) // 2
        start, used, following = 0, 0, high
        for _ in range(partitions):
            end = bisect_right(sums, sums[start] + cap, start + 1) - 1
            used = max(used, sums[end] - sums[start])
            if end == count:
                high = used
                break
            following = min(following, sums[end + 1] - sums[start])
            start = end
        else:
            low = following
    return high


def even_cuts(sums: list[int], partitions: int, cap: int) -> list[int]:
    """Cuts into non-empty blocks under the cap, each block as near to the average as possible."""
    count = len(sums) - 1
    # earliest[b]: the first place from which the blocks b, b+1, ... can hold the rest
    earliest = [count] * (partitions + 1)
    for b in range(partitions - 1, 0, -1):
        reach = _first_at_least(sums, sums[earliest[b + 1]] - cap)
        earliest[b] = max(b, min(reach, earliest[b + 1] - 1))
    cuts = [0]
    for b in range(1, partitions):
        start = cuts[-1]
        low = max(start + 1, earliest[b])
        high = min(bisect_right(sums, sums[start] + cap) - 1, count - (partitions - b))
        remaining = partitions - b + 1
        # The cut nearest to an equal share of the rest. Both sides are multiplied by `remaining`: integers.
        target = sums[start] * remaining + sums[count] - sums[start]
        right = min(max(_first_at_least(sums, -(-target // remaining)), low), high)
        left = max(right - 1, low)
        nearer = abs(sums[left] * remaining - target) <= abs(sums[right] * remaining - target)
        cuts.append(left if nearer else right)
    return [*cuts, count]


def _first_at_least(sums: list[int], value: int) -> int:
    return bisect_right(sums, value - 1)


Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Solution:
    """A balance: the layers and the time of each stage."""

    balance: list[int]
    times: list[float]

    @property
    def bottleneck(self) -> float:
        """The time of the slowest stage."""
        return max(self.times)


def balance_stages(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    memory_cap: float | Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Solution:
    """The balance with the fastest slowest stage; among several, the one with the most even stages.

    >>> balance_stages([4, 1, 1, 1, 1], 2).balance
    [1, 4]
    >>> balance_stages([1, 1, 1, 1], 2, speeds=[3, 1]).balance
    [3, 1]
    >>> balance_stages([1, 1, 1, 1], 2, memory=[1, 1, 5, 5], memory_cap=7).balance
    [3, 1]

    Args:
        costs: the time of each layer on a device of speed 1.
        stages: the number of stages; none is empty.
        memory: the memory of each layer, in any unit.
        memory_cap: the most memory of a stage: one number, or one per stage.
        speeds: the speed of each stage's device.
    """
    n = len(costs)
    if stages < 1:
        raise ValueError(f"the number of stages must be positive, got {stages}")
    if n < stages:
        raise ValueError(f"{n} layers cannot fill {stages} stages")
    problem = balance_problem(costs, stages, memory, memory_cap, speeds)
    bottleneck = problem.least_bottleneck()
    if bottleneck is None:
        raise ValueError(f"no balance of {n} layers over {stages} stages meets the memory caps")
    cuts = problem.cheapest(bottleneck, lambda stage, starts, ends: problem.times(stage, starts, ends) ** 2)
    assert cuts is not None
    return Solution([b - a for a, b in pairwise(cuts)], problem.stage_times(cuts))


@dataclass(frozen=True)
class Problem:
    """Stage j holds the layers start..end-1. Its constraints depend only on j, the start and the end."""

    costs: Vector  # sums of prefixes
    speeds: Vector
    memory: Vector  # sums of prefixes
    caps: Vector

    def times(self, stage: int, starts: Indices, ends: Indices) -> Vector:
        """The times of a stage, for pairs of starts and ends."""
        times: Vector = (self.costs[ends] - self.costs[starts]) / self.speeds[stage]
        return times

    def stage_times(self, cuts: list[int]) -> list[float]:
        """The time of every stage between cuts."""
        spans = enumerate(pairwise(np.array(cuts)))
        return [float(self.times(j, a, b)) for j, (a, b) in spans]

    def allows(self, stage: int, starts: Indices, ends: Indices, cap: float) -> NDArray[np.bool_]:
        """Whether the stage may be there, and is not slower than the cap."""
        allowed: NDArray[np.bool_] = (
            (starts < ends)
            & (self.memory[ends] - self.memory[starts] <= self.caps[stage])
            & (self.times(stage, starts, ends) <= cap)
        )
        return allowed

    def least_bottleneck(self) -> float | None:
        """The least possible time of the slowest stage; None if no cuts meet the constraints."""
        cuts = self.cheapest(np.inf, self.times, np.maximum)
        return None if cuts is None else max(self.stage_times(cuts))

    def cheapest(self, cap: float, price: Price, join: np.ufunc = np.add) -> list[int] | None:
        """The cuts with the least price, among those without a stage slower than the cap.

        `price` takes a stage, its starts and its ends; `join` adds the prices, or takes the largest.
        Of equal prices, the last start counts.
        """
        n, stages = len(self.costs) - 1, len(self.speeds)
        starts = np.arange(n + 1)[:, None]
        best = np.where(starts[:, 0] == 0, 0.0, np.inf)  # the least price of the stages so far, by their end
        chosen = np.zeros((stages, n + 1), dtype=np.int64)
        for stage in range(stages):
            following = np.full(n + 1, np.inf)
            for first in range(1, n + 1, _COLUMNS):
                ends = np.arange(first, min(first + _COLUMNS, n + 1))
                prices = join(best[:, None], price(stage, starts, ends))
                prices = np.where(self.allows(stage, starts, ends, cap), prices, np.inf)
                chosen[stage, ends] = n - prices[::-1].argmin(axis=0)
                following[ends] = prices[chosen[stage, ends], ends - first]
            best = following
        if best[n] == np.inf:
            return None
        cuts = [n]
        for stage in range(stages - 1, -1, -1):
            cuts.append(int(chosen[stage, cuts[-1]]))
        return cuts[::-1]


Price = Callable[[int, Indices, Indices], Vector]
_COLUMNS = 256  # ends at a time, since a table of all starts and ends of a long line is large


def balance_problem(
    costs: Sequence[float] | Vector,
    stages: int,
    memory: Sequence[float] | Vector | None,
    memory_cap: float | Sequence[float] | None,
    speeds: Sequence[float] | None,
) -> Problem:
    """The problem with these constraints. Raises ValueError if they have another form."""
    n = len(costs)
    problem = Problem(
        _sums(costs, "costs", n),
        _per_stage(speeds, "speeds", stages, 1.0),
        _sums(memory, "memory", n),
        _per_stage(memory_cap, "memory_cap", stages, np.inf),
    )
    if memory is None and memory_cap is not None:
        raise ValueError("memory_cap needs the memory of each layer")
    return problem


def _sums(values: Sequence[float] | Vector | None, name: str, count: int) -> Vector:
    vector = np.zeros(count) if values is None else np.asarray(values, dtype=np.float64)
    if len(vector) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(vector)}")
    wrong = vector[~(np.isfinite(vector) & (vector >= 0))]
    if len(wrong):
        raise ValueError(f"{name} must be finite and not negative, got {wrong[0]}")
    return np.concatenate([[0.0], np.cumsum(vector)])


def _per_stage(values: float | Sequence[float] | None, name: str, stages: int, default: float) -> Vector:
    if values is None:
        return np.full(stages, default)
    vector = np.full(stages, values) if isinstance(values, int | float) else np.asarray(values, np.float64)
    if len(vector) != stages:
        raise ValueError(f"{name} must have one entry per stage ({stages}), got {len(vector)}")
    if not (vector > 0).all():
        raise ValueError(f"{name} must be positive, got {vector.tolist()}")
    return vector.astype(np.float64)
