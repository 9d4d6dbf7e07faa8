"""Block partitions of sequences: cut a sequence so that the largest block is as small as it can be."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import TypeVar

Number = TypeVar("Number", int, float)


def solve(sequence: Sequence[Number], partitions: int = 1) -> list[list[Number]]:
    """Cut a sequence into blocks, none empty, that minimise the largest sum. Exact.

    Where several cuts have the same largest sum, the blocks are kept as even as they can be from the
    left. Floats are compared as the exact numbers they are.

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
    """The sums of all prefixes, as whole numbers on one exact scale."""
    wrong = [x for x in sequence if not (math.isfinite(x) and x >= 0)]
    if wrong:
        raise ValueError(f"costs must be finite and not negative, got {wrong[0]}")
    if all(isinstance(x, Integral) for x in sequence):
        return [0, *accumulate(int(x) for x in sequence)]
    # A float is a whole number over a power of two, so the largest denominator serves them all.
    ratios = [float(x).as_integer_ratio() for x in sequence]
    scale = max(denominator for _, denominator in ratios)
    return [0, *accumulate(numerator * (scale // denominator) for numerator, denominator in ratios)]


def smallest_bottleneck(sums: list[int], partitions: int) -> int:
    """The smallest cap such that so many blocks under it cover everything.

    Bisection over caps, but each probe moves a bound to a sum that really occurs: a cap that is enough
    comes down to the largest block it made, one that is not goes up to the smallest that changes a block.
    """
    total, count = sums[-1], len(sums) - 1
    largest = max(sums[i + 1] - sums[i] for i in range(count))
    low = max(largest, -(-total // partitions))
    high = -(-total // partitions) + largest  # greedy always succeeds with this
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
    """Cuts that keep every block under the cap and not empty, each as near to the average as it can be."""
    count = len(sums) - 1
    # earliest[b]: from where on the blocks b, b+1, ... can hold the rest
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
        # The cut nearest to an equal share of what is left: compared times `remaining`, to stay exact.
        target = sums[start] * remaining + sums[count] - sums[start]
        right = min(max(_first_at_least(sums, -(-target // remaining)), low), high)
        left = max(right - 1, low)
        nearer = abs(sums[left] * remaining - target) <= abs(sums[right] * remaining - target)
        cuts.append(left if nearer else right)
    return [*cuts, count]


def _first_at_least(sums: list[int], value: int) -> int:
    return bisect_right(sums, value - 1)
