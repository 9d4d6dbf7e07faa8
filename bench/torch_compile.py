"""The zoo through `torch.compile(backend="intarsia")`, against `intarsia.compile` of the same models.

    python bench/torch_compile.py [--full] [--only bert] [--table speed|sizes] [--partition dependency]
                                  [--few-guards] [--results FILE.json] [--slice 200]

The first table has latency, in interleaved rounds in one process, and the ratio, which should be at most 1.05
for models of the size they are known by. Where plans are measured, two searches may end in two plans: the
last column tells, and `--partition dependency` gives both sides one plan. `--few-guards` leaves out Dynamo's
guards on torch's own modules, by torch's own filter: for those who do not change modules between calls.

The second has four lengths (for images: batches) after one compile with `dynamic=True`: the graphs made,
how often they were compiled, the share of nodes on engines, and the largest difference from eager.

With `--results` each row is kept as soon as it is there, and a later run goes on with those that are missing;
`--slice` begins no further model after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
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
from intarsia.timing import PAUSE_S, race

console = Console()
LENGTHS = (16, 7, 24, 11)
BATCHES = (2, 3, 5, 4)
FILTER = "guard_filter_fn"  # an option of torch.compile's own, which no backend sees


def door(model: nn.Module, dynamic: bool, options: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    reports(clear=True)
    return torch.compile(model, backend=intarsia_backend, dynamic=dynamic, options=dict(options))


def speed(name: str, full: bool, options: dict[str, Any]) -> tuple[str, ...]:
    thing = zoo.specimen(name, full=full)
    args, kwargs = thing.args, thing.kwargs
    of_compile = {key: value for key, value in options.items() if key != FILTER}
    fast = intarsia.compile(thing.model, args, kwargs, **of_compile)
    quick = door(thing.model, False, options)
    times = race(
        {
            "compile": lambda: fast(*args, **kwargs),
            "torch.compile": lambda: quick(*args, **kwargs),
            "eager": lambda: thing.model(*args, **kwargs),
        },
        rounds=50,
        budget_s=30,
        pause_s=PAUSE_S,
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


COLUMNS = {
    "speed": ("model", "eager ms", "compile ms", "torch.compile ms", "ratio", "of the best", "graphs", "on"),
    "sizes": ("model", "graphs", "compiled", "on engines", "error", "left to PyTorch"),
}
RUNS: dict[str, Callable[[str, bool, dict[str, Any]], tuple[str, ...]]] = {"speed": speed, "sizes": sizes}


def measured(kind: str, name: str, asked: argparse.Namespace) -> list[str]:
    options: dict[str, Any] = {} if asked.partition is None else {"partition": asked.partition}
    if asked.few_guards:
        options[FILTER] = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe
    try:
        with torch.no_grad():
            return list(RUNS[kind](name, asked.full, options))
    except Exception as error:  # the others are measured all the same
        return [name, f"{type(error).__name__}: {str(error).splitlines()[0]}"]


def printed(kind: str, rows: list[list[str]]) -> None:
    title = f"torch.compile(backend='intarsia'): {kind}, {torch.get_num_threads()} threads"
    table = Table(title=title)
    for column in COLUMNS[kind]:
        table.add_column(column, justify="left" if column in ("model", "left to PyTorch") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if kind == "speed":
        ratios = [float(row[4]) for row in rows if len(row) > 4]
        within = sum(ratio <= 1.05 for ratio in ratios)
        console.print(f"{within} of {len(rows)} models take at most 1.05 times as long", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="models of the size they are known by")
    parser.add_argument("--only", nargs="*", default=None, help="architectures of the zoo")
    parser.add_argument("--partition", default=None, help="a strategy for both sides, such as dependency")
    parser.add_argument("--few-guards", action="store_true", help="none on torch's own modules")
    parser.add_argument("--table", choices=list(RUNS), default=None)
    parser.add_argument("--results", help="a JSON file that keeps every row, and is gone on with")
    parser.add_argument("--slice", type=float, help="begin no further model after so many seconds")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    kept = Path(asked.results) if asked.results else None
    known: dict[str, list[str]] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for kind in RUNS if asked.table is None else (asked.table,):
        keys = {
            name: f"{kind} {name} {'full' if asked.full else 'small'} {asked.partition}"
            for name in asked.only or zoo.names()
        }
        for name, key in keys.items():
            is_over = asked.slice is not None and time.monotonic() - began > asked.slice
            if key in known or is_over:
                continue
            known[key] = measured(kind, name, asked)
            console.print(*known[key])
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(known, indent=1))
        printed(kind, [known[key] for key in keys.values() if key in known])


if __name__ == "__main__":
    main()
