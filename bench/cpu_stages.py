"""How near stages on the CPU come to the ideal speed-up of a pipeline, n * m / (m + n - 1).

    python bench/cpu_stages.py [--stages 2] [--chunks 8] [--rounds 10]

Every stage has one intra-op thread; the plain module runs the same micro-batches on one thread. The
machine needs a free core per stage. Rounds are interleaved; the best of each counts, since anything else
on the machine can only add to a time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

# On ARM `torch.set_num_threads` does not reach the library that convolves: the plain module would have two.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.timing import race


def layers(count: int, channels: int) -> nn.Sequential:
    """Equal layers of convolutions: much arithmetic for the memory they touch."""
    convolutions = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(count))
    return nn.Sequential(*(nn.Sequential(convolution, nn.ReLU(inplace=True)) for convolution in convolutions))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    n, m = arguments.stages, arguments.chunks
    # Workers share the caller's threads: one each. The plain module gets one as well.
    plain = layers(4 * n, arguments.channels)
    x = torch.rand(arguments.batch, arguments.channels, 16, 16)

    def pipe(checkpoint: str, concurrent: bool) -> GPipe:
        balance = [4] * n
        devices = ["cpu"] * n
        return GPipe(
            plain, balance, devices=devices, chunks=m, checkpoint=checkpoint, concurrent_backward=concurrent
        )

    def micro_batches(checkpoint: bool) -> torch.Tensor:
        run = (
            (lambda p: torch.utils.checkpoint.checkpoint(plain, p, use_reentrant=True))
            if checkpoint
            else plain
        )
        return torch.cat([run(piece.requires_grad_(checkpoint)) for piece in x.chunk(m)])

    @torch.no_grad()
    def forward(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model(x)

    def step(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model(x).sum().backward()

    never, always = pipe("never", True), pipe("always", True)
    torch.set_num_threads(1)
    cases = {
        "forward": (lambda: forward(lambda _: micro_batches(False)), lambda: forward(never)),
        "step, checkpoint never": (lambda: step(lambda _: micro_batches(False)), lambda: step(never)),
        "step, checkpoint always": (lambda: step(lambda _: micro_batches(True)), lambda: step(always)),
    }
    ideal = n * m / (m + n - 1)
    table = Table(title=f"{n} stages, {m} micro-batches: ideal speed-up {ideal:.2f}")
    for column in ("", "plain, ms", "pipeline, ms", "speed-up", "of the ideal"):
        table.add_column(column, justify="right" if column else "left")
    for name, (one, two) in cases.items():
        timings = race(
            {"plain": one, "pipeline": two}, rounds=arguments.rounds, warmup=1, least=arguments.rounds
        )
        plain_s, pipeline_s = timings["plain"].best, timings["pipeline"].best
        speed_up = plain_s / pipeline_s
        times = [f"{seconds * 1e3:.1f}" for seconds in (plain_s, pipeline_s)]
        table.add_row(name, *times, f"{speed_up:.2f}", f"{speed_up / ideal:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
