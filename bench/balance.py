"""How good and fast the exact balance is, and how near a training step on two CPU stages comes to the ideal.

    python bench/balance.py [--layers 200] [--stages 8] [--rounds 20] [--steps 10]

For every kind of cost it prints the bottleneck (the most expensive stage) as a multiple of the least
possible one, the mean and the worst over the rounds, and the median time to find the cuts.

Then models are cut by `split` into two stages, one thread each, and a step of 8 micro-batches is set against
the plain step on one thread: the ideal one takes (m + n - 1) / (n * m) of its time. `by time` compares the
clock, the median over rounds in which both run, and needs two free cores; `least` compares the fastest steps
of all rounds, since anything else on the machine can only add to a time. `beside` is how much more CPU time
the plain step takes while a second process does the same on the other core: cores share memory and power,
and no pipeline is faster than that. `of the cores` is the share of what the ideal is then. `by work` compares
what the threads did (CPU time of the plain step, of the slowest stage and of the caller): it tells balance
and overhead on a busy machine too, but not waiting.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from intarsia.cli.pipeline_train import TinyGPT
from intarsia.pipeline import solver as blockpartition
from intarsia.pipeline import split

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


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models whose micro-batches take some ten milliseconds a stage."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(128, 128, 3, padding=1) for _ in range(16))
    conv = nn.Sequential(*(nn.Sequential(c, nn.ReLU()) for c in convolutions))
    return {
        "convolutions": (conv, torch.rand(32, 128, 12, 12)),
        "gpt": (TinyGPT(width=256, layers=8), torch.randint(0, 256, (32, 64))),
    }


class Neighbour:
    """A process that does training steps of its own on the other core, while it is asked to."""

    def __init__(self, name: str, recompute: bool, chunks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.wanted, self.works = context.Event(), context.Event()
        arguments = (name, recompute, chunks, self.wanted, self.works)
        self.process = context.Process(target=_work_beside, args=arguments, daemon=True)
        self.process.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """As long as this lasts, once it has begun."""
        self.works.clear()
        self.wanted.set()
        self.works.wait()
        try:
            yield
        finally:
            self.wanted.clear()

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.join()


def _work_beside(name: str, recompute: bool, chunks: int, wanted: Any, works: Any) -> None:
    torch.set_num_threads(1)
    model, x = models()[name]
    plain_step(model, x, recompute, chunks)
    while wanted.wait():
        works.set()
        model.zero_grad()
        plain_step(model, x, recompute, chunks)


def plain_step(model: nn.Module, x: Tensor, recompute: bool, chunks: int) -> None:
    """A step over the same micro-batches, by one thread."""
    rows = [checkpoint(model, p, use_reentrant=False) if recompute else model(p) for p in x.chunk(chunks)]
    torch.cat(rows).square().mean().backward()


def training_shares(name: str, recompute: bool, steps: int, stages: int = 2, chunks: int = 8) -> list[str]:
    """The cells of a row: milliseconds plain and piped, the balance, and the shares of the ideal."""
    model, x = models()[name]
    parts = split(model, (x[: len(x) // chunks],), stages=stages)
    pipe = parts.gpipe(chunks, checkpoint="always" if recompute else "never", concurrent_backward=True)
    neighbour = Neighbour(name, recompute, chunks)

    def stage_work() -> list[float]:
        threads = pipe.engine._threads
        return [threads.submit(j, time.thread_time).result() for j in range(stages)]

    def timed(run: Callable[[], None]) -> tuple[float, float]:
        model.zero_grad()
        clocks = time.perf_counter(), time.thread_time()
        run()
        return time.perf_counter() - clocks[0], time.thread_time() - clocks[1]

    plain: list[tuple[float, float]] = []
    piped: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    each: list[list[float]] = []
    for i in range(steps + 1):
        plain.append(timed(lambda: plain_step(model, x, recompute, chunks)))
        begin = stage_work()
        piped.append(timed(lambda: pipe(x).square().mean().backward()))
        each.append([b - a for a, b in zip(begin, stage_work(), strict=True)])
        with neighbour.working():
            beside.append(timed(lambda: plain_step(model, x, recompute, chunks)))
        if not i:  # to warm up
            for found in (plain, piped, beside, each):
                found.clear()
    neighbour.end()
    ideal = (chunks + stages - 1) / (stages * chunks)
    slower = statistics.median(b[1] / a[1] for a, b in zip(plain, beside, strict=True))
    share = statistics.median(ideal * a[0] / b[0] for a, b in zip(plain, piped, strict=True))
    of_work = [max(e) * (chunks + stages - 1) / chunks + p[1] for e, p in zip(each, piped, strict=True)]
    return [
        f"{statistics.median(p[0] for p in plain) * 1e3:.1f}",
        f"{statistics.median(p[0] for p in piped) * 1e3:.1f}",
        f"{parts.report.balance:.0%}",
        f"{statistics.median(statistics.mean(e) / max(e) for e in each):.0%}",
        f"{share:.0%}",
        f"{ideal * min(p[0] for p in plain) / min(p[0] for p in piped):.0%}",
        f"{slower:.2f}",
        f"{share * slower:.0%}",
        f"{ideal * statistics.median(p[1] for p in plain) / statistics.median(of_work):.0%}",
    ]


def training_table(steps: int) -> Table:
    """A row for every model, with and without recomputation."""
    torch.set_num_threads(1)
    table = Table(title="a training step on 2 CPU stages, 8 micro-batches: share of the ideal")
    for column in ("model", "recomputing", "plain ms", "pipe ms", "cut balance", "work balance"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for column in ("by time", "least", "beside", "of the cores", "by work"):
        table.add_column(column, justify="right")
    for name in models():
        for recompute in (False, True):
            shares = training_shares(name, recompute, steps)
            table.add_row(name, "yes" if recompute else "no", *shares)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 200, 2000])
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="training steps measured; 0 leaves them out")
    arguments = parser.parse_args()
    console = Console(width=110)
    for layers, stages in zip(arguments.layers, arguments.stages, strict=True):
        table = Table(title=f"{layers} layers over {stages} stages, {arguments.rounds} rounds")
        for column in ("costs", "cuts", "mean", "worst", "ms", "empty"):
            table.add_column(column, justify="left" if column in ("costs", "cuts") else "right")
        for kind in KINDS:
            for row in measure(kind, layers, stages, arguments.rounds):
                table.add_row(kind.__name__.replace("_", "-"), *row)
            table.add_section()
        console.print(table)
    if arguments.steps:
        console.print(training_table(arguments.steps))


if __name__ == "__main__":
    main()
