"""Scheduling units of several colours into the fewest runs of one colour.

Everything here is plain integers. Unit `v` has colour `colours[v]` and must come after the units `before[v]`,
all smaller than `v`. A schedule is a list of runs. A unit with a negative colour has a run of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Units in topological order: the colour of each, and the units that come before it."""

    colours: Sequence[int]
    before: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.colours)


Runs = list[list[int]]


def in_order(problem: Problem) -> Runs:
    """The units in order; a new run starts where the colour changes."""
    runs: Runs = []
    last = None
    for unit, colour in enumerate(problem.colours):
        if colour < 0 or colour != last:
            runs.append([])
        runs[-1].append(unit)
        last = colour
    return runs


def first_fit(problem: Problem) -> Runs:
    """One run of every colour is open. It is closed when a unit of another colour needs one of its units.

    Open runs never need each other, so the runs in the order in which they are closed are a valid schedule.
    """
    closed: Runs = []
    open_runs: dict[int, list[int]] = {}
    open_in: dict[int, int] = {}  # unit -> colour of its open run
    for unit, colour in enumerate(problem.colours):
        for earlier in problem.before[unit]:
            holder = open_in.get(earlier)
            if holder is None or holder == colour:
                continue
            run = open_runs.pop(holder)
            for member in run:
                del open_in[member]
            closed.append(run)
        if colour < 0:
            closed.append([unit])
            continue
        open_runs.setdefault(colour, []).append(unit)
        open_in[unit] = colour
    closed.extend(open_runs.values())
    return merge(problem, closed)


def alternate(problem: Problem) -> Runs:
    """The fewest runs for two colours, in linear time.

    The runs of two colours alternate, so a schedule is a first colour and a number for every unit. The number
    of a unit is at least that of every unit before it, one more if the colours differ, and its parity is that
    of its colour. Taking the least such number for every unit gives a schedule. With the same first colour,
    no schedule has fewer runs, because each number is a lower bound; and there are only two first colours.
    """
    kinds = list(dict.fromkeys(problem.colours))
    return min((_levels(problem, start) for start in kinds), key=len, default=[])


def fewest(problem: Problem) -> Runs:
    """The fewest runs: exact for up to two colours; for more, a heuristic that is never above `first_fit`."""
    colours = set(problem.colours)
    if len(colours) <= 2 and all(colour >= 0 for colour in colours):
        return alternate(problem)
    candidates = [first_fit(problem), in_order(problem)]
    heights = _heights(problem.colours, _after(problem))
    candidates += [_fill(problem, heights, weigh_all=weigh_all) for weigh_all in (True, False)]
    candidates.append(_backwards(problem))
    return _tighten(problem, min(candidates, key=len))


def merge(problem: Problem, runs: Runs) -> Runs:
    """The runs with neighbours of one colour joined."""
    merged: Runs = []
    last = None
    for run in runs:
        colour = problem.colours[run[0]]
        if colour >= 0 and colour == last:
            merged[-1].extend(run)
        else:
            merged.append(list(run))
        last = colour
    for run in merged:
        run.sort()
    return merged


def _levels(problem: Problem, start: int) -> Runs:
    level: list[int] = []
    for unit, colour in enumerate(problem.colours):
        least = 0 if colour == start else 1
        for earlier in problem.before[unit]:
            step = level[earlier] if problem.colours[earlier] == colour else level[earlier] + 1
            least = max(least, step)
        level.append(least)
    runs: Runs = [[] for _ in range(max(level, default=-1) + 1)]
    for unit, number in enumerate(level):
        runs[number].append(unit)
    return [run for run in runs if run]


def _after(problem: Problem) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in problem.colours]
    for unit, earlier in enumerate(problem.before):
        for other in earlier:
            after[other].append(unit)
    return after


def _heights(colours: Sequence[int], after: Sequence[Sequence[int]]) -> list[int]:
    """How many colour changes at least follow each unit, plus one."""
    heights = [1] * len(colours)
    for unit in range(len(colours) - 1, -1, -1):
        for later in after[unit]:
            step = heights[later] if colours[later] == colours[unit] >= 0 else heights[later] + 1
            heights[unit] = max(heights[unit], step)
    return heights


def _fill(problem: Problem, heights: Sequence[int], *, weigh_all: bool) -> Runs:
    """Take the colour with the most work behind it, fill its run as far as it goes, and repeat.

    With `weigh_all`, that is the largest sum of the heights of its ready units. Otherwise it is the largest
    height, and the sum breaks ties.
    """
    after = _after(problem)
    missing = [len(earlier) for earlier in problem.before]
    ready: dict[int, list[int]] = {}
    total: dict[int, int] = {}
    longest: dict[int, int] = {}

    def release(unit: int) -> None:
        colour = problem.colours[unit]
        ready.setdefault(colour, []).append(unit)
        total[colour] = total.get(colour, 0) + heights[unit]
        longest[colour] = max(longest.get(colour, 0), heights[unit])

    def rank(colour: int) -> tuple[int, int]:
        return (total[colour], longest[colour]) if weigh_all else (longest[colour], total[colour])

    for unit, count in enumerate(missing):
        if not count:
            release(unit)
    runs: Runs = []
    while ready:
        colour = max(ready, key=rank)
        run = ready.pop(colour)
        total.pop(colour), longest.pop(colour)
        for unit in run:  # the loop appends to it
            for later in after[unit]:
                missing[later] -= 1
                if missing[later]:
                    continue
                if problem.colours[later] == colour and colour >= 0:
                    run.append(later)
                else:
                    release(later)
        run.sort()
        runs.append(run)
    return runs


def _backwards(problem: Problem) -> Runs:
    """The runs of `_fill` on the reversed graph, reversed."""
    last = len(problem) - 1
    after = _after(problem)
    turned = Problem(
        [problem.colours[last - unit] for unit in range(last + 1)],
        [[last - later for later in after[last - unit]] for unit in range(last + 1)],
    )
    heights = _heights(turned.colours, _after(turned))
    runs = _fill(turned, heights, weigh_all=True)
    return [sorted(last - unit for unit in run) for run in reversed(runs)]


def _tighten(problem: Problem, runs: Runs, *, effort: int = 400_000) -> Runs:
    """Leave out every run that the others can absorb, for at most `effort` unit visits."""
    sequence = [problem.colours[run[0]] for run in runs]
    tries = effort // max(1, len(problem))
    place = 0
    while place < len(sequence) and tries > 0:
        shorter = sequence[:place] + sequence[place + 1 :]
        fitted = _fit(problem, shorter)
        tries -= 1
        if fitted is None:
            place += 1
        else:
            runs, sequence = fitted, [problem.colours[run[0]] for run in fitted]
            place = max(0, place - 1)
    return runs


def _fit(problem: Problem, sequence: Sequence[int]) -> Runs | None:
    """Each unit in the first run of its colour that may hold it; None if the sequence is too short."""
    places: dict[int, list[int]] = {}
    for place, colour in enumerate(sequence):
        places.setdefault(colour, []).append(place)
    level: list[int] = []
    runs: Runs = [[] for _ in sequence]
    for unit, colour in enumerate(problem.colours):
        earliest = max((level[earlier] for earlier in problem.before[unit]), default=0)
        own = places.get(colour, [])
        nearest = bisect_left(own, earliest)
        if nearest == len(own):
            return None
        place = own[nearest]
        level.append(place)
        runs[place].append(unit)
    return merge(problem, [run for run in runs if run])
