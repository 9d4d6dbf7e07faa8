"""Mixes of engines: the costs of blocks on each engine, and the cheapest paths through them.

Within a tolerance, engines of shorter arithmetic run all blocks, or all except the worst.

Costs of blocks only propose mixes. They do not include what engines do across blocks, so they are scaled to
each engine's time for the whole model, and whole plans are measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from intarsia.choose.blocks import Blocks
from intarsia.choose.candidate import Candidate, Workshop
from intarsia.choose.findings import BlockCost
from intarsia.choose.measured import Objective
from intarsia.choose.memory import Memory, key_of
from intarsia.choose.race import race_plans
from intarsia.engines import Engine, PyTorch
from intarsia.lower.purity import dequantizes
from intarsia.partition import PYTORCH, PartitionOptions
from intarsia.partition.support import support_table
from intarsia.runtime.inlay import Inlay

Costs = Sequence[Mapping[str, float]]  # for each block, seconds on each engine that can run it


def path_cost(costs: Costs, entering: Mapping[str, float], path: Sequence[str]) -> float:
    """The seconds of a path through the blocks: every block, and every entry into an engine.

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
    """The `count` cheapest paths, in order. Of equal ones, that with fewer crossings is first, then by name.

    The search takes blocks x engines^2 x count steps.

    >>> shortest_paths([{"a": 1.0, "b": 1.2}, {"a": 3.0, "b": 1.0}], {"a": 0.1, "b": 0.1})
    [('a', 'b')]
    """
    if not costs:
        return [()]
    # For each engine of the last block: (seconds, crossings, path), the cheapest first.
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


Run = Callable[[], object]
_TURNS = 30  # of every engine, in which crossings are timed


@dataclass(frozen=True)
class Costing:
    """Measures blocks and crossings, unless measurements are stored.

    `context` has everything that programs depend on besides graph, engines and objective.
    """

    workshop: Workshop
    engines: Sequence[Engine]
    objective: Objective
    memory: Memory
    context: str = ""

    def costs(
        self, blocks: Blocks, inputs: Sequence[Any], enough: Callable[[str], bool]
    ) -> tuple[BlockCost, ...] | None:
        """The seconds of every block on every engine that takes it; None if `enough` stopped the measurement.

        Equal blocks are measured once. `enough` is called with the name of the next step, and returns whether
        to stop.
        """
        known: dict[str, dict[str, float]] = {}
        block_inputs = blocks.values(inputs)
        for number, (piece, digest) in enumerate(zip(blocks.pieces, blocks.digests, strict=True)):
            if digest in known:
                continue
            if enough(f"block {number} of {len(blocks)}"):
                return None
            known[digest] = self._block(piece.module, digest, block_inputs[number])
        return tuple(replace(block, seconds=dict(known[block.contents])) for block in blocks.untimed())

    def entering(self) -> dict[str, float]:
        """The seconds of a call with almost no work on each engine, measured in turns."""
        key = key_of("crossing", self.engines, *self._names)
        costs = {name: self.memory.cost(f"{key} {name}") for name in self._names}
        if all(seconds is not None for seconds in costs.values()):
            return {name: seconds for name, seconds in costs.items() if seconds is not None}
        x = torch.linspace(-1, 1, 64).reshape(1, 64)
        runs = {e.name: self._run(_relu(x), e, [x], PartitionOptions(min_block_size=1)) for e in self.engines}
        times = _turns({name: run for name, run in runs.items() if run is not None})
        for name, seconds in times.items():
            self.memory.keep_cost(f"{key} {name}", seconds)
        return times

    @property
    def _names(self) -> list[str]:
        return [engine.name for engine in self.engines]

    def _block(self, module: fx.GraphModule, digest: str, inputs: list[Any]) -> dict[str, float]:
        keys = {e.name: key_of(digest, [e], self.objective, self.context) for e in self.engines}
        costs: dict[str, float] = {}
        runs: dict[str, Run] = {}
        for engine in self.engines:
            known_cost = self.memory.cost(keys[engine.name])
            if known_cost is not None:
                costs[engine.name] = known_cost
            elif (
                run := self._run(module, engine, inputs, self.workshop.builder.settings.options)
            ) is not None:
                runs[engine.name] = run
        if runs:
            for name, took in race_plans(runs, self.objective, rounds=7, least=2, budget_s=0.4).items():
                costs[name] = statistics.median(took)
                self.memory.keep_cost(keys[name], costs[name])
        return {name: costs[name] for name in self._names if name in costs}

    def _run(
        self, module: fx.GraphModule, engine: Engine, inputs: list[Any], options: PartitionOptions
    ) -> Run | None:
        """A block on one engine, with PyTorch for nodes that it refuses; None if it takes no node."""
        engines = [engine] if engine.name == PYTORCH else [engine, PyTorch()]
        builder = self.workshop.builder.of_block(module, engines, inputs, options=options, tolerance=None)
        built = builder.run(support_table(module, engines))
        if engine.name not in built.plan.engines:
            return None
        inlay = Inlay(module.graph, built)
        return lambda: inlay.results(inputs)


def _turns(runs: dict[str, Run]) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(_TURNS):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                took[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def _relu(x: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    source = graph.placeholder("x")
    relu = graph.call_function(torch.ops.aten.relu.default, (source,))
    source.meta["val"] = relu.meta["val"] = x
    graph.output((relu,))
    return fx.GraphModule(torch.nn.Module(), graph)


_GAIN = 0.99  # of the fastest plan so far; a mix that may be slower than this is not built
_LOOKED_AT = 24  # paths


def calibrated(
    blocks: Sequence[BlockCost], entering: Mapping[str, float], alone: Mapping[str, float]
) -> list[dict[str, float]]:
    """The blocks' costs, without the cost of a call, scaled to whole plans.

    The blocks of one engine take less, or more, as one segment than one by one. So their sum is set to the
    time that the engine takes for the whole model `alone`.

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
    """At most `count` paths over several engines whose cost is below `best`, the cheapest first."""
    costs = calibrated(blocks, entering, alone)
    price = {engine: entering.get(engine, 0.0) for cost in costs for engine in cost}
    ways = shortest_paths(costs, price, _LOOKED_AT)
    mixed = [way for way in ways if len(set(way)) > 1 and path_cost(costs, price, way) < best * _GAIN]
    return mixed[:count]


def mix(blocks: Blocks, engines: Sequence[Engine], way: Sequence[str]) -> Candidate:
    """The candidate that runs block `i` on `way[i]`, with a unique name."""
    bounds = [i for i in range(len(way)) if i == 0 or way[i] != way[i - 1]]
    parts = [f"{way[i]} {i}-{end - 1}" for i, end in zip(bounds, [*bounds[1:], len(way)], strict=True)]
    name = f"mix of blocks: {', '.join(parts)}"
    return Candidate(name, tuple(engines), blocks=tuple(way), homes=blocks.homes(way))


def shortened(module: fx.GraphModule, engines: Sequence[Engine]) -> list[Candidate]:
    """Every engine of shorter arithmetic that can be faster, with PyTorch for nodes that it refuses."""
    quantized = any(dequantizes(node.target) for node in module.graph.nodes)
    able = [e for e in engines if not e.is_exact and (quantized or not e.quantized_only)]
    return [Candidate(e.name, (e, engines[-1]), options=1) for e in able]


def block_error(
    workshop: Workshop, blocks: Blocks, number: int, engine: Engine, inputs: list[object]
) -> float:
    """The error of one block on an engine of shorter arithmetic, with PyTorch's results of earlier blocks."""
    module, engines = blocks.pieces[number].module, [engine, PyTorch()]
    builder = workshop.builder.of_block(module, engines, inputs, tolerance=math.inf)
    builder.run(support_table(module, engines))
    return max(builder.errors.values(), default=0.0)


def with_exact_blocks(
    blocks: Blocks,
    errors: Sequence[float],
    engine: Engine,
    exact: Engine,
    count: int,
    engines: Sequence[Engine],
) -> Candidate:
    """The blocks on an engine of shorter arithmetic, except the `count` blocks with the largest errors.

    >>> worst_of([0.1, 0.5, 0.2], 2)
    [1, 2]
    """
    worst = worst_of(errors, count)
    way = tuple(exact.name if number in worst else engine.name for number in range(len(blocks)))
    used = [e for e in engines if e.name in (*way, PYTORCH)]
    name = f"{engine.name}, blocks {', '.join(map(str, worst))} on {exact.name}"
    return Candidate(name, tuple(used), options=1, blocks=way, homes=blocks.homes(way))


def worst_of(errors: Sequence[float], count: int) -> list[int]:
    """The numbers of the largest errors, in order."""
    ranked = sorted(range(len(errors)), key=lambda number: -errors[number])
    return sorted(ranked[:count])
