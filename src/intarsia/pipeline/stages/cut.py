"""The choice of cuts in a line of nodes: the best balance first, then the fewest bytes that cross.

With a slack of 10 % in the balance, cuts were 90 % balanced although 99 % was possible, which slows every
step. The default of 2 % is the resolution of measured costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from intarsia.errors import PartitionError
from intarsia.pipeline.balance.solver import balance_stages

_CANDIDATES = 400


def choose_cuts(
    weights: Sequence[float],
    crossing: Sequence[float],
    allowed: Sequence[int],
    stages: int,
    *,
    slack: float = 0.05,
    speeds: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    caps: Sequence[float] | None = None,
) -> list[int]:
    """The cuts with the fewest crossing bytes, among those within `slack` of the lightest heaviest stage.

    `weights[i]` is the cost of node `i`; `crossing[c]` the bytes that cross a cut before node `c`. A stage's
    weight is divided by its speed in `speeds`. The sum of `memory` over a stage is at most its cap in `caps`.

    >>> choose_cuts([1, 1, 1, 1], [0, 9, 1, 9, 0], [1, 2, 3], 2)
    [2]
    """
    if stages < 1:
        raise PartitionError(f"stages={stages} must be 1 or more")
    if len(allowed) < stages - 1:
        raise PartitionError(f"stages={stages} needs {stages - 1} cuts; the graph allows {len(allowed)}")
    line = _Line(weights, memory, speeds, caps, stages)
    places = cheapest_places(allowed, line.weight, crossing, max(_CANDIDATES, 4 * stages))
    bounds = [0, *places, len(weights)]
    best = _bottleneck(line, bounds, stages)
    # Slightly more than the slack, since sums in another order differ in the last bits.
    return _fewest_bytes(line, bounds, crossing, stages, best * (1 + slack + 1e-9))


class _Line:
    """Sums over stretches of the line, by stage."""

    def __init__(
        self,
        weights: Sequence[float],
        memory: Sequence[float] | None,
        speeds: Sequence[float] | None,
        caps: Sequence[float] | None,
        stages: int,
    ) -> None:
        self.weight = [0.0, *accumulate(weights)]
        self.memory = [0.0, *accumulate(memory)] if memory is not None else None
        self.speeds = list(speeds) if speeds is not None else [1.0] * stages
        self.caps = list(caps) if caps is not None else None
        if len(self.speeds) != stages or (self.caps is not None and len(self.caps) != stages):
            raise PartitionError(
                f"stages={stages}, but {len(self.speeds)} speeds and {len(self.caps or [])} caps"
            )

    def load(self, stage: int, first: int, last: int) -> float:
        """The weight of a stretch on a stage; infinite if the memory does not fit."""
        caps, memory = self.caps, self.memory
        if caps is not None and memory is not None and memory[last] - memory[first] > caps[stage]:
            return float("inf")
        return (self.weight[last] - self.weight[first]) / self.speeds[stage]


def cheapest_places(
    places: Sequence[int], sums: Sequence[float], crossing: Sequence[float], most: int
) -> list[int]:
    """About `most` of these places: the cheapest cut in each stretch of equal weight.

    `sums[i]` is the weight before place `i`.
    """
    if len(places) <= most:
        return list(places)
    step = (sums[-1] or 1.0) / most
    best: dict[int, int] = {}
    for place in places:
        stretch = int(sums[place] / step)
        if stretch not in best or crossing[place] < crossing[best[stretch]]:
            best[stretch] = place
    return sorted(best.values())


def _bottleneck(line: _Line, bounds: Sequence[int], stages: int) -> float:
    """The least possible weight of the heaviest stage."""
    stretches = list(pairwise(bounds))
    memory = line.memory
    try:
        return balance_stages(
            [line.weight[b] - line.weight[a] for a, b in stretches],
            stages,
            memory=None if memory is None else [memory[b] - memory[a] for a, b in stretches],
            memory_cap=line.caps if memory is not None else None,
            speeds=line.speeds,
        ).bottleneck
    except ValueError as error:
        raise PartitionError(
            f"no cut into {stages} stages fits the memory caps {line.caps}: {error}"
        ) from error


def _fewest_bytes(
    line: _Line, bounds: Sequence[int], crossing: Sequence[float], stages: int, cap: float
) -> list[int]:
    """The cuts with the fewest crossing bytes among those with stages of at most `cap`."""
    size = len(bounds)
    infinite = float("inf")
    best = [0.0 if j and line.load(0, 0, b) <= cap else infinite for j, b in enumerate(bounds)]
    sources: list[list[int]] = []
    for stage in range(1, stages):
        following, source = [infinite] * size, [0] * size
        for j in range(stage + 1, size):
            for i in range(j - 1, stage - 1, -1):
                if line.load(stage, bounds[i], bounds[j]) > cap:
                    break
                value = best[i] + crossing[bounds[i]]
                if value < following[j]:
                    following[j], source[j] = value, i
        best = following
        sources.append(source)
    cuts, j = [], size - 1
    for source in reversed(sources):
        j = source[j]
        cuts.append(bounds[j])
    return cuts[::-1]
