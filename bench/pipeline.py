"""Pipelines on CPU: speed-up and memory over stages and chunks, prediction beside measurement.

    python bench/pipeline.py [--quick] [--rounds 5]

Each configuration runs in interleaved rounds in one process, one torch thread a stage; the least time counts.
The plain model runs on one thread too, so the ideal speed-up of m chunks on n stages is n * m / (m + n - 1).
`kept MB` is what autograd really keeps for a step, and `recomputing` with checkpointing; the last two columns
are the simulation's megabytes of the fullest stage.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from intarsia.cli.pipeline_train import TinyGPT
from intarsia.pipeline import split
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import schedule


def mlp(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())])


def models(quick: bool) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    scale = 1 if quick else 2
    return {
        "mlp": (mlp(256 * scale, 8), torch.randn(256, 256 * scale)),
        "gpt": (TinyGPT(width=64 * scale, layers=8), torch.randint(0, 256, (32, 64))),
    }


def step(module: nn.Module, x: torch.Tensor) -> float:
    module.zero_grad()
    begin = time.perf_counter()
    module(x).square().mean().backward()
    return time.perf_counter() - begin


def kept_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """What autograd really keeps over one forward pass, weights left out, of all micro-batches."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x)
    del output
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer configurations")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, one thread a stage\n")
    head = (
        f"{'model':<6}{'stages':>7}{'chunks':>7}{'plain ms':>10}{'pipe ms':>10}{'speed-up':>10}{'ideal':>7}"
    )
    print(
        f"{head}{'predicted ms':>14}{'measured/predicted':>20}{'kept MB':>9}{'recomputing':>13}"
        f"{'GPipe':>8}{'1F1B':>8}"
    )
    for name, (model, x) in models(options.quick).items():
        for stages in [n for n in (1, 2, 4) if n <= max(2, cores)]:
            for chunks in (1, 4, 8) if options.quick else (1, 2, 4, 8, 16):
                row(name, model, x, stages, chunks, options.rounds)


def row(name: str, model: nn.Module, x: torch.Tensor, stages: int, chunks: int, rounds: int) -> None:
    part = x[: len(x) // chunks]
    parts = split(model, (part,), stages=stages)
    pipe = parts.gpipe(chunks=chunks, checkpoint="never", concurrent_backward=True)
    plain, piped = [], []
    for i in range(rounds + 1):
        times = step(model, x), step(pipe, x)
        if i:
            plain.append(times[0])
            piped.append(times[1])
    costs: tuple[Cost, ...] = parts.report.costs
    fill = simulate(schedule("GPipe", stages, chunks), costs)
    lean = simulate(schedule("1F1B", stages, chunks), costs)
    ideal = stages * chunks / (chunks + stages - 1)
    kept = kept_bytes(pipe, x) / 2**20
    again = kept_bytes(parts.gpipe(chunks=chunks, checkpoint="always"), x) / 2**20
    print(
        f"{name:<6}{stages:>7}{chunks:>7}{min(plain) * 1e3:>10.1f}{min(piped) * 1e3:>10.1f}"
        f"{min(plain) / min(piped):>10.2f}{ideal:>7.2f}{fill.step_time * 1e3:>14.1f}"
        f"{min(piped) / fill.step_time:>20.2f}{kept:>9.2f}{again:>13.2f}"
        f"{max(fill.peak_memory) / 2**20:>8.1f}{max(lean.peak_memory) / 2**20:>8.1f}"
    )


if __name__ == "__main__":
    main()
