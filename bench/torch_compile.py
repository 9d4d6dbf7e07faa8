"""The zoo through `torch.compile(backend="intarsia")`, against `intarsia.compile` of the same models.

    python bench/torch_compile.py [--full] [--only bert] [--table speed|sizes] [--partition dependency]

The first table has latency, in interleaved rounds in one process, and the ratio, which should be at most 1.05
for models of the size they are known by. Where plans are measured, two searches may end in two plans: the
last column tells, and `--partition dependency` gives both sides one plan.

The second has four lengths (for images: batches) after one compile with `dynamic=True`: the graphs made,
how often they were compiled, the share of nodes on engines, and the largest difference from eager.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

import intarsia
from intarsia.backend import intarsia_backend, reports
from intarsia.cli import zoo
from intarsia.compare import relative_error
from intarsia.timing import race

console = Console()
LENGTHS = (16, 7, 24, 11)
BATCHES = (2, 3, 5, 4)


def door(model: nn.Module, dynamic: bool, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    reports(clear=True)
    return torch.compile(model, backend=intarsia_backend, dynamic=dynamic, options=options)


def speed(name: str, full: bool, options: dict[str, Any]) -> tuple[str, ...]:
    thing = zoo.specimen(name, full=full)
    args, kwargs = thing.args, thing.kwargs
    fast = intarsia.compile(thing.model, args, kwargs, **options)
    quick = door(thing.model, False, options)
    times = race(
        {
            "compile": lambda: fast(*args, **kwargs),
            "torch.compile": lambda: quick(*args, **kwargs),
            "eager": lambda: thing.model(*args, **kwargs),
        },
        rounds=50,
        budget_s=20,
    )
    ours, theirs, eager = (times[peer] for peer in ("compile", "torch.compile", "eager"))
    in_pairs = sorted(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    return (
        name,
        f"{eager.median * 1e3:.2f}",
        f"{ours.median * 1e3:.2f}",
        f"{theirs.median * 1e3:.2f}",
        f"{in_pairs[len(in_pairs) // 2]:.3f}",
        f"{theirs.best / ours.best:.3f}",
        str(len(reports())),
        " / ".join((",".join(fast.plan.engines), *(",".join(report.engines) for report in reports()))),
    )


def resized(value: Any, turn: int, full: bool) -> Any:
    """A tensor of the call in another length, or, an image, as another batch."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 2:  # tokens, masks, samples of sound
        unit = value.shape[1] if value.is_floating_point() else (4 if full else 1)
        length = LENGTHS[turn] * unit // (8 if value.is_floating_point() else 1)
        picked = torch.arange(length) % value.shape[1]
        return value[:, picked].contiguous()
    batch = torch.cat([value] * BATCHES[turn])
    for axis in range(1, batch.ndim):  # the sides of an image stay as they are
        torch._dynamo.mark_static(batch, axis)
    return batch


def sizes(name: str, full: bool, options: dict[str, Any]) -> tuple[str, ...]:
    thing = zoo.specimen(name, full=full)
    quick = door(thing.model, True, options)
    off = 0.0
    for turn in range(len(LENGTHS)):
        args, kwargs = pytree.tree_map(lambda x: resized(x, turn, full), (thing.args, thing.kwargs))  # noqa: B023
        wanted = thing.model(*args, **kwargs)
        off = max(off, relative_error(quick(*args, **kwargs), wanted))
    made = reports()
    nodes, placed = sum(r.nodes for r in made), sum(r.on_engines for r in made)
    reasons = "; ".join(dict.fromkeys(r.reason for r in made if r.reason is not None))
    return (
        name,
        str(len(made)),
        str(sum(r.programs for r in made)),
        f"{placed / nodes:.0%}" if nodes else "0%",
        f"{off:.1e}",
        reasons[:90],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="models of the size they are known by")
    parser.add_argument("--only", nargs="*", default=None, help="architectures of the zoo")
    parser.add_argument("--partition", default=None, help="a strategy for both sides, such as dependency")
    parser.add_argument("--table", choices=["speed", "sizes"], default=None)
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    columns = {
        "speed": (
            "model",
            "eager ms",
            "compile ms",
            "torch.compile ms",
            "ratio",
            "of the best",
            "graphs",
            "on",
        ),
        "sizes": ("model", "graphs", "compiled", "on engines", "error", "left to PyTorch"),
    }
    for kind, run in (("speed", speed), ("sizes", sizes)):
        if asked.table not in (None, kind):
            continue
        table = Table(title=f"torch.compile(backend='intarsia'): {kind}, {torch.get_num_threads()} threads")
        for column in columns[kind]:
            table.add_column(
                column, justify="right" if column not in ("model", "left to PyTorch") else "left"
            )
        for name in asked.only or zoo.names():
            with torch.no_grad():
                row = run(name, asked.full, {} if asked.partition is None else {"partition": asked.partition})
            console.print(*row)
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
