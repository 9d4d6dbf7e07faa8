"""What watching for NaN, large integers and wrong indices costs on OpenVINO: with guards over without.

    python bench/guards.py [name ...]

Whole architectures at full size, interleaved rounds in one process, 1 thread; medians and bests.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import intarsia
from intarsia.cli import zoo
from intarsia.timing import race

NAMES = ("resnet50", "mobilenet_v2", "bert", "gpt2", "llama", "vit")


def compiled(name: str, guards: bool) -> Any:
    thing = zoo.specimen(name, full=True)
    engine = intarsia.OpenVINO(threads=1, guards=guards)
    fast = intarsia.compile(thing.model, thing.args, thing.kwargs, engines=[engine], min_block_size=1)
    return fast, lambda: fast(*thing.args, **thing.kwargs)


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="OpenVINO with guards over without, batch 1, 1 thread")
    for column in ("model", "guards", "without ms", "with ms", "median ratio", "best ratio"):
        table.add_column(column, justify="right")
    for name in sys.argv[1:] or NAMES:
        fast, watched = compiled(name, True)
        _, bare = compiled(name, False)
        count = sum(len(step.program.program.guards) for step in fast.inlay.steps)
        times = race({"bare": bare, "watched": watched}, rounds=200, budget_s=30)
        a, b = times["bare"], times["watched"]
        table.add_row(
            name,
            str(count),
            f"{a.median * 1e3:.2f}",
            f"{b.median * 1e3:.2f}",
            f"{b.median / a.median:.3f}",
            f"{b.best / a.best:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
