"""What every block takes on every engine, and what it costs to enter an engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from intarsia.build.builder import Builder
from intarsia.choose.blocks import Blocks
from intarsia.choose.candidate import Workshop, options_for
from intarsia.choose.findings import BlockCost
from intarsia.choose.load import race_plans
from intarsia.choose.measured import Objective
from intarsia.choose.memory import Memory, key_of
from intarsia.engines import Engine, PyTorch
from intarsia.partition import PYTORCH, PartitionOptions
from intarsia.partition.support import support_table
from intarsia.runtime.inlay import Inlay

Run = Callable[[], object]
_TURNS = 30  # of every engine, when crossings are timed


@dataclass(frozen=True)
class Costing:
    """Measures blocks and crossings, unless they are remembered.

    `context` is what programs depend on besides graph, engines and objective.
    """

    workshop: Workshop
    engines: Sequence[Engine]
    objective: Objective
    memory: Memory
    context: str = ""

    def costs(
        self, blocks: Blocks, inputs: Sequence[Any], enough: Callable[[str], bool]
    ) -> tuple[BlockCost, ...] | None:
        """Seconds of every block on every engine that takes it; None if `enough` ended it before the last.

        Equal blocks are measured once. `enough` is told what comes next, and says whether to stop.
        """
        known: dict[str, dict[str, float]] = {}
        fed = blocks.values(inputs)
        for number, (piece, digest) in enumerate(zip(blocks.pieces, blocks.digests, strict=True)):
            if digest in known:
                continue
            if enough(f"block {number} of {len(blocks)}"):
                return None
            known[digest] = self._block(piece.module, digest, fed[number])
        return tuple(replace(block, seconds=dict(known[block.contents])) for block in blocks.untimed())

    def entering(self) -> dict[str, float]:
        """Seconds of a call that does next to nothing, made in turn with the other engines'."""
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
            elif (run := self._run(module, engine, inputs, self.workshop.builder.options)) is not None:
                runs[engine.name] = run
        if runs:
            for name, took in race_plans(runs, self.objective, rounds=7, least=2, budget_s=0.4).items():
                costs[name] = statistics.median(took)
                self.memory.keep_cost(keys[name], costs[name])
        return {name: costs[name] for name in self._names if name in costs}

    def _run(
        self, module: fx.GraphModule, engine: Engine, inputs: list[Any], options: PartitionOptions
    ) -> Run | None:
        """A block on one engine, with PyTorch for what it refuses; None where it takes nothing of it."""
        pattern = self.workshop.builder
        engines = [engine] if engine.name == PYTORCH else [engine, PyTorch()]
        builder = Builder(
            module,
            engines,
            # What must be full is the whole; that a block is not shows in its time.
            replace(options_for(options, [one.name for one in engines]), require_full_compilation=False),
            pattern.strategy,
            pattern.rewrite,
            [inputs] if pattern.examples else (),
            pattern.build_limit_s,
        )
        plan, pieces, programs = builder.run(support_table(module, engines))
        if engine.name not in plan.engines:
            return None
        inlay = Inlay(module.graph, pieces, programs)
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
