"""How good and how fast the exact balance is, beside the block-partition heuristic and equal-count cuts.

    python bench/balance.py [--layers 200] [--stages 8] [--rounds 20]

For every kind of cost it prints the bottleneck (the most expensive stage) as a multiple of the least
possible one, the mean and the worst over the rounds, and the median time to find the cuts.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from intarsia.pipeline.balance import blockpartition

Costs = list[float]
Cutter = Callable[[Costs, int], list[Costs]]


def equal_count(costs: Costs, stages: int) -> list[Costs]:
    """As many layers in every stage."""
    cuts = [len(costs) * j // stages for j in range(stages + 1)]
    return [costs[a:b] for a, b in itertools.pairwise(cuts)]


def barany(costs: Costs, stages: int) -> list[Costs]:
    """The heuristic of Bárány and Grinberg's theorem: no two blocks need differ by more than one element.

    While the largest and the smallest block differ by more, one element at a time moves a block's border
    on the way from the largest towards the nearest smallest block: the first move on that way which
    leaves its receiver below the largest. A bound on the moves ends it where zeros would keep it going.
    """
    most = max(costs)
    borders = [*range(stages), len(costs)]
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(borders)]
    for _ in range(10 * stages * len(costs)):
        high, low = max(sums), min(sums)
        if high - low <= most:
            break
        large = sums.index(high)
        small = min((j for j in range(stages) if sums[j] == low), key=lambda j: abs(j - large))
        step = 1 if small > large else -1
        for giver in range(large, small, step):
            receiver = giver + step
            border = max(giver, receiver)
            element = costs[borders[border] - 1] if step > 0 else costs[borders[border]]
            if sums[receiver] + element < high:
                borders[border] -= step
                sums[giver] -= element
                sums[receiver] += element
                break
    return [costs[a:b] for a, b in itertools.pairwise(borders)]


def uniform(layers: int, draw: random.Random) -> Costs:
    return [draw.random() for _ in range(layers)]


def lognormal(layers: int, draw: random.Random) -> Costs:
    return [draw.lognormvariate(0, 1) for _ in range(layers)]


def gpt_like(layers: int, draw: random.Random) -> Costs:
    """A cheap embedding, equal blocks with measuring noise, and a head as dear as several blocks."""
    blocks = [draw.gauss(1, 0.03) for _ in range(layers - 2)]
    return [0.1, *blocks, draw.uniform(2, 6)]


def near_constant(layers: int, draw: random.Random) -> Costs:
    return [1 + 1e-3 * draw.random() for _ in range(layers)]


KINDS = [uniform, lognormal, gpt_like, near_constant]
CUTTERS: dict[str, Cutter] = {
    "exact (ours)": blockpartition.solve,
    "heuristic": barany,
    "equal count": equal_count,
}


def measure(
    kind: Callable[[int, random.Random], Costs], layers: int, stages: int, rounds: int
) -> list[list[str]]:
    """A row per cutter: its name, the mean and the worst ratio, the median time, empty stages."""
    ratios: dict[str, list[float]] = {name: [] for name in CUTTERS}
    times: dict[str, list[float]] = {name: [] for name in CUTTERS}
    empty = dict.fromkeys(CUTTERS, 0)
    for seed in range(rounds):
        costs = kind(layers, random.Random(seed))
        least = max(map(sum, blockpartition.solve(costs, stages)))
        for name, cut in CUTTERS.items():  # side by side in every round, so that a busy machine hits all
            start = time.perf_counter()
            blocks = cut(costs, stages)
            times[name].append(time.perf_counter() - start)
            assert [x for block in blocks for x in block] == costs
            ratios[name].append(max(map(sum, blocks)) / least)
            empty[name] += any(not block for block in blocks)
    return [
        [
            name,
            f"{statistics.mean(ratios[name]):.3f}",
            f"{max(ratios[name]):.3f}",
            f"{statistics.median(times[name]) * 1e3:.3f}",
            str(empty[name]),
        ]
        for name in CUTTERS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 200, 2000])
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    console = Console()
    for layers, stages in zip(arguments.layers, arguments.stages, strict=True):
        table = Table(title=f"{layers} layers over {stages} stages, {arguments.rounds} rounds")
        for column in ("costs", "cuts", "mean", "worst", "ms", "empty"):
            table.add_column(column, justify="left" if column in ("costs", "cuts") else "right")
        for kind in KINDS:
            for row in measure(kind, layers, stages, arguments.rounds):
                table.add_row(kind.__name__.replace("_", "-"), *row)
            table.add_section()
        console.print(table)


if __name__ == "__main__":
    main()
