"""How far the simulation of a cluster is from real steps: predictions beside runs of 2 and 4 gloo processes.

    python bench/simulation.py [--processes 2 4] [--width 256] [--layers 8] [--rounds 5]

On each number of processes it first measures what a cluster's description says: the link between two
processes, what handing a micro-batch over costs a rank, and what a step costs beside its passes (two small
exchanges), all on a model that computes next to nothing. Then a GPT is cut, each stage's passes are measured
by `split` on one process while the others wait, and the loss; every schedule is predicted and run, in turns.
`speed` is what a rank computes beside the others, as a share of what it computes alone: cores that
share memory are slower when all are busy, and more processes than cores share them. The error is prediction
over measurement, less one; that of work compares what the ranks were predicted to do with their CPU time: a
busy machine disturbs it less. `others` is the share of the cores that other processes had in the step that is
shown, which is the fastest of those they had least of.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from intarsia.cli.pipeline_train import TinyGPT, next_token_loss
from intarsia.pipeline import Stages, split
from intarsia.pipeline.plan.cluster import Link
from intarsia.pipeline.plan.simulate import StageTable, end_times
from intarsia.pipeline.schedules import SCHEDULES as DEFINITIONS
from intarsia.pipeline.schedules import slot_table

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZeroBubble"]


@dataclass(frozen=True, order=True)
class Step:
    """One step: the share of the cores that others had, seconds of the slowest rank, CPU seconds of all."""

    others: float
    seconds: float
    cpu: float


def busy_seconds() -> float:
    """CPU seconds of all processes of this machine since it started; 0 where nothing tells."""
    try:
        with open("/proc/stat", encoding="ascii") as counts:
            fields = counts.readline().split()[1:8]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft = map(int, fields)
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def steps_of(run: Callable[[], object], rounds: int, warm_up: int = 1) -> list[Step]:
    """Steps that all ranks begin together."""
    found = []
    for i in range(warm_up + rounds):
        dist.barrier()
        begin, own, machine = time.perf_counter(), time.process_time(), busy_seconds()
        run()
        done = torch.tensor(time.process_time() - own)
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        machine = busy_seconds() - machine
        dist.all_reduce(done)
        told = torch.tensor(max(0.0, machine - float(done)) / float(took) / cores())
        dist.broadcast(told, 0)
        if i >= warm_up:
            # The counts of the machine are in hundredths of a second: a share below is none.
            others = float(told) if float(told) > 0.02 + 0.02 / float(took) / cores() else 0.0
            found.append(Step(round(others, 1), float(took), float(done)))
    return found


def least(run: Callable[[], object], rounds: int) -> float:
    """The least seconds of a step by the slowest rank."""
    return min(step.seconds for step in steps_of(run, rounds))


def measure_link(rounds: int) -> Link:
    """Latency and bandwidth between ranks 0 and 1, from messages there and back."""

    def exchange(tensor: torch.Tensor) -> None:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    short, long = torch.zeros(1), torch.zeros(2**20)
    latency = least(lambda: exchange(short), 4 * rounds) / 2
    seconds = least(lambda: exchange(long), 2 * rounds) / 2
    return Link(long.numel() * 4 / max(seconds - latency, 1e-9), latency)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def measured_split(
    model: nn.Module, example: torch.Tensor, stages: int, rounds: int
) -> tuple[Stages, np.ndarray]:
    """The model cut by rank 0's costs, measured while the others wait, and the least of these by stage.

    The least, as of the steps that they are to predict.
    """
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        parts = split(model, (example,), stages=stages)
        cuts = [cut.place for cut in parts.report.cuts]
        again = [parts, *(split(model, (example,), cuts=cuts) for _ in range(rounds - 1))]
        told = [cuts, np.min([_costs(each) for each in again], 0)]
    dist.broadcast_object_list(told, 0)
    if dist.get_rank() != 0:
        parts = split(model, (example,), cuts=told[0], by="memory")
    return parts, told[1]


def _costs(parts: Stages) -> list[list[float]]:
    return [[c.forward, c.backward_input, c.backward_weight, c.apart] for c in parts.report.costs]


def measure_loss(model: nn.Module, example: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Seconds of the loss of a micro-batch, forward and backward, which the last stage computes too."""
    logits = model(example).detach().requires_grad_()
    seconds = []
    for _ in range(10 * rounds):
        begin = time.perf_counter()
        loss = next_token_loss(logits, example)
        middle = time.perf_counter()
        torch.autograd.grad(loss, logits)
        seconds.append((middle - begin, time.perf_counter() - middle))
    return min(s[0] for s in seconds), min(s[1] for s in seconds)


def measure_handover(rounds: int) -> tuple[float, float]:
    """Seconds a pass of a micro-batch takes without computing, and those of a step beside its passes."""
    world = dist.get_world_size()
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 * world)])
    x = torch.randn(2, 2)
    parts = split(model, (x,), stages=world, by="memory")
    counts = [2 * world, 8 * world]
    seconds = []
    for m in counts:
        pipe = parts.distributed("1F1B", m, loss_fn=F.mse_loss, check_loss=False)
        batch = torch.randn(2 * m, 2)
        seconds.append(least(partial(pipe.step, batch, target=batch), 2 * rounds))
    passes = [2 * (m + world - 1) for m in counts]
    each = max(0.0, (seconds[1] - seconds[0]) / (passes[1] - passes[0]))
    return each, max(0.0, seconds[0] - each * passes[0])


def measure_speed(model: nn.Module, ids: torch.Tensor, rounds: int) -> float:
    """How fast a rank computes beside the others, as a share of how fast it does alone.

    Cores that share memory and power are slower when all are busy, and processes may outnumber them.
    """

    def step() -> None:
        model(ids).square().mean().backward()

    def alone() -> None:
        if dist.get_rank() == 0:
            step()

    def at_once() -> None:
        step()

    seconds: dict[Callable[[], None], float] = dict.fromkeys((alone, at_once), float("inf"))
    for _ in range(rounds):
        for run in seconds:
            seconds[run] = min(seconds[run], least(run, 2))
    return min(1.0, seconds[alone] / seconds[at_once])


@dataclass
class Case:
    """One way to run the model: what was predicted, and what was measured."""

    words: tuple[object, ...]
    predicted: float
    work: float
    run: Callable[[], object]
    steps: list[Step] = field(default_factory=list)

    @property
    def best(self) -> Step:
        """The fastest of the steps that other processes disturbed least."""
        return min(self.steps)

    @property
    def error(self) -> float:
        """Of the seconds of a step."""
        return self.predicted / self.best.seconds - 1

    @property
    def work_error(self) -> float:
        """Of the CPU seconds of all ranks."""
        return self.work / min(step.cpu for step in self.steps) - 1


def rank_main(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = TinyGPT(width=options.width, layers=options.layers)
    example = torch.randint(0, 256, (options.samples, 64))
    speed = measure_speed(model, example, options.rounds)
    link = measure_link(options.rounds)
    handover, step = measure_handover(options.rounds)
    handover = max(0.0, handover - link.latency)
    loss = measure_loss(model, example, options.rounds)
    say = print if rank == 0 else (lambda *_: None)
    say(
        f"\n{world} processes: speed {speed:.2f}, latency {link.latency * 1e6:.0f} us, bandwidth"
        f" {link.bandwidth / 1e9:.2f} GB/s, handover {handover * 1e6:.0f} us, a step {step * 1e6:.0f} us"
    )
    cases: list[Case] = []
    splits = {n: measured_split(model, example, n, options.rounds) for n in (world, 2 * world)}
    for _, costs in splits.values():
        costs[-1, :2] += loss
    for name in SCHEDULES:
        stages = world * DEFINITIONS[name].per_rank
        parts, costs = splits[stages]
        for m in (world, 4 * world):
            if DEFINITIONS[name].refusal(world, m) is not None:
                continue
            for recompute in (False, True):
                table = StageTable(
                    costs.T / speed,
                    np.zeros(stages),
                    np.zeros(stages),
                    np.array(parts.report.crossing, float),
                    handover,
                )
                links = np.array([link.seconds(b) for b in parts.report.crossing])
                slots = slot_table(name, world, m, stages // world)
                predicted = step + float(end_times(slots, table, links, recompute).max())
                pipe = parts.distributed(
                    name, m, loss_fn=next_token_loss, check_loss=False, checkpoint=recompute
                )
                ids = torch.randint(0, 256, (options.samples * m, 64))
                run = partial(pipe.step, ids, target=ids)
                work = m * float(table.work(recompute).sum()) * min(1.0, cores() / world)
                cases.append(Case((name, m, "yes" if recompute else "no"), predicted, work, run))
    for turn in range(options.rounds):  # in turns: a machine that is slow for a while meets all of them
        for case in cases:
            case.steps += steps_of(case.run, 2, warm_up=turn == 0)
    say(
        f"{'schedule':<17}{'m':>4}{'recomputing':>13}{'predicted ms':>14}"
        f"{'measured ms':>13}{'others':>8}{'error':>8}{'work error':>12}"
    )
    for case in cases:
        name, m, again = case.words
        say(
            f"{name:<17}{m:>4}{again:>13}{case.predicted * 1e3:>14.1f}{case.best.seconds * 1e3:>13.1f}"
            f"{case.best.others:>8.0%}{case.error:>+8.0%}{case.work_error:>+12.0%}"
        )
    errors = [case.error for case in cases]
    works = [case.work_error for case in cases]
    say(
        f"error: median {statistics.median(map(abs, errors)):.0%}, largest {max(map(abs, errors)):.0%}"
        f" (mean {statistics.mean(errors):+.0%}); of work: median {statistics.median(map(abs, works)):.0%},"
        f" largest {max(map(abs, works)):.0%} (mean {statistics.mean(works):+.0%})"
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    for world in options.processes:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        subprocess.run([*launch, *sys.argv], env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, check=True)


if __name__ == "__main__":
    main()
