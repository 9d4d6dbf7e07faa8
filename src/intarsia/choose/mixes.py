"""Mixes worth building: the cheapest ways through blocks and engines, by what was measured.

Blocks only propose. Their costs leave out what engines do across them, so they are scaled to each engine's
whole time, and whole plans decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intarsia.choose.blocks import Blocks
from intarsia.choose.candidate import Candidate
from intarsia.choose.findings import BlockCost
from intarsia.choose.path import path_cost, shortest_paths
from intarsia.engines import Engine

_GAIN = 0.99  # of the best plan so far; a mix that promises less is not worth a build
_LOOKED_AT = 24


def calibrated(
    blocks: Sequence[BlockCost], entering: Mapping[str, float], alone: Mapping[str, float]
) -> list[dict[str, float]]:
    """The blocks' costs, less the call that each was measured with, to the scale of whole plans.

    Blocks of one engine that run as one segment take less, or more, than one by one: their sum is set to what
    the engine took for the whole model `alone`.

    >>> blocks = [BlockCost(0, 1, "", "", {"a": 2.0}), BlockCost(1, 1, "", "", {"a": 4.0})]
    >>> calibrated(blocks, {"a": 1.0}, {"a": 3.0})
    [{'a': 0.5}, {'a': 1.5}]
    """
    costs = [{e: max(s - entering.get(e, 0.0), 0.0) for e, s in block.seconds.items()} for block in blocks]
    for engine, whole in alone.items():
        if not all(engine in cost for cost in costs):
            continue
        total = sum(cost[engine] for cost in costs)
        scale = max(whole - entering.get(engine, 0.0), 0.0) / total if total else 1.0
        for cost in costs:
            cost[engine] *= scale
    return costs


def promising_mixes(
    blocks: Sequence[BlockCost],
    entering: Mapping[str, float],
    alone: Mapping[str, float],
    best: float,
    count: int,
) -> list[tuple[str, ...]]:
    """At most `count` ways of more than one engine that promise to be faster than `best`, cheapest first."""
    costs = calibrated(blocks, entering, alone)
    price = {engine: entering.get(engine, 0.0) for cost in costs for engine in cost}
    ways = shortest_paths(costs, price, _LOOKED_AT)
    mixed = [way for way in ways if len(set(way)) > 1 and path_cost(costs, price, way) < best * _GAIN]
    return mixed[:count]


def mix(blocks: Blocks, engines: Sequence[Engine], way: Sequence[str]) -> Candidate:
    """The candidate that runs block `i` on `way[i]`, with a name that tells it from other mixes."""
    bounds = [i for i in range(len(way)) if i == 0 or way[i] != way[i - 1]]
    parts = [f"{way[i]} {i}-{end - 1}" for i, end in zip(bounds, [*bounds[1:], len(way)], strict=True)]
    name = f"mix of blocks: {', '.join(parts)}"
    return Candidate(name, tuple(engines), blocks=tuple(way), homes=blocks.homes(way))
