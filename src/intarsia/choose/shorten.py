"""Candidates in shorter arithmetic, within a tolerance: whole, or with the worst blocks kept exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from intarsia.build.builder import Builder
from intarsia.choose.blocks import Blocks
from intarsia.choose.candidate import Candidate, Workshop, options_for
from intarsia.engines import Engine, PyTorch
from intarsia.lower.passes import dequantizes
from intarsia.partition import PYTORCH
from intarsia.partition.support import support_table


def shortened(module: fx.GraphModule, engines: Sequence[Engine]) -> list[Candidate]:
    """Every engine of shorter arithmetic alone, where it is of use, PyTorch for what it refuses."""
    quantized = any(dequantizes(node.target) for node in module.graph.nodes)
    able = [e for e in engines if not e.is_exact and (quantized or not e.quantized_only)]
    return [Candidate(e.name, (e, engines[-1]), options=1) for e in able]


def block_error(
    workshop: Workshop, blocks: Blocks, number: int, engine: Engine, inputs: list[object]
) -> float:
    """The error of one block on an engine of shorter arithmetic, given what PyTorch makes of those before."""
    module, pattern = blocks.pieces[number].module, workshop.builder
    engines = [engine, PyTorch()]
    builder = Builder(
        module,
        engines,
        replace(options_for(pattern.options, [e.name for e in engines]), require_full_compilation=False),
        pattern.strategy,
        pattern.rewrite,
        [inputs],
        pattern.build_limit_s,
        tolerance=float("inf"),
    )
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
    """The blocks on an engine of shorter arithmetic, but for the `count` of the largest errors.

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
