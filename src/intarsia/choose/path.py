"""Who runs which block: the cheapest way through blocks and engines, when changing engines has a price.

block      0      1      2      3
openvino   ●──────●             ●        a step down or up is a crossing, and costs `entering` the engine
pytorch            ╲──────●────╱         that it leads to; staying on an engine costs the block alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Costs = Sequence[Mapping[str, float]]  # for each block, seconds on each engine that can run it


def path_cost(costs: Costs, entering: Mapping[str, float], path: Sequence[str]) -> float:
    """Seconds of a way through the blocks: every block, and every entry into an engine.

    >>> path_cost([{"a": 1.0, "b": 2.0}] * 2, {"a": 0.5, "b": 0.0}, ["a", "b"])
    3.5
    """
    total = 0.0
    before: str | None = None
    for cost, engine in zip(costs, path, strict=True):
        total += cost[engine] + (entering[engine] if engine != before else 0.0)
        before = engine
    return total


def shortest_paths(costs: Costs, entering: Mapping[str, float], count: int = 1) -> list[tuple[str, ...]]:
    """The `count` cheapest ways, cheapest first; of equal ones, that with fewer crossings, then by name.

    Each state keeps its `count` best ways, so the search takes blocks x engines^2 x count steps.

    >>> shortest_paths([{"a": 1.0, "b": 1.2}, {"a": 3.0, "b": 1.0}], {"a": 0.1, "b": 0.1})
    [('a', 'b')]
    """
    if not costs:
        return [()]
    # For each engine the last block ran on: (seconds, crossings, way), best first.
    states: dict[str, list[tuple[float, int, tuple[str, ...]]]] = {
        engine: [(entering[engine] + cost, 0, (engine,))] for engine, cost in costs[0].items()
    }
    for block in costs[1:]:
        states = {
            engine: sorted(
                (
                    seconds + cost + (0.0 if last == engine else entering[engine]),
                    crossings + (last != engine),
                    (*way, engine),
                )
                for last, ways in states.items()
                for seconds, crossings, way in ways
            )[:count]
            for engine, cost in block.items()
        }
    ends = sorted(state for ways in states.values() for state in ways)
    return [way for _, _, way in ends[:count]]
