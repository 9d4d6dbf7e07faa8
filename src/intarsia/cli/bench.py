"""`intarsia demo` and `intarsia bench`: a model on every engine, timed beside PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.compiler import compile
from intarsia.engines import default_engines
from intarsia.timing import race

EAGER = "PyTorch eager"


def compare(
    specimen: Specimen, *, torch_compile: bool = False, seconds: float = 20.0, print_plan: bool = False
) -> None:
    """Compile a model on each engine alone and on the measured plan; print notes, errors and times."""
    console = Console()
    weights = sum(p.numel() for p in specimen.model.parameters())
    console.print(
        f"[bold]{type(specimen.model).__name__}[/], {weights / 1e6:.1f} M weights, "
        f"{torch.get_num_threads()} threads"
    )
    peers: dict[str, Callable[..., Any]] = {EAGER: specimen.model}
    if torch_compile:
        peers["torch.compile"] = torch.compile(specimen.model)
    for label, engines in _engine_choices():
        compiled = compile(specimen.model, specimen.args, specimen.kwargs, engines=engines)
        peers[f"intarsia, {label}"] = compiled
        for note in compiled.notes:
            console.print(note, style="yellow", markup=False)
    if print_plan:
        console.print(str(compiled.plan), highlight=False, markup=False)
    console.print(_table(peers, specimen, seconds, console))


def _table(
    peers: dict[str, Callable[..., Any]], specimen: Specimen, seconds: float, console: Console
) -> Table:
    table = Table(title="latency, and the largest difference from eager as a share of the largest output")
    for column in ("", "median ms", "best ms", "of eager", "error"):
        table.add_column(column, justify="left" if not column else "right")
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    with torch.no_grad():
        expected = specimen.model(*specimen.args, **specimen.kwargs)
        for name, peer in peers.items():
            call = _call(peer, specimen)
            try:
                errors[name] = relative_error(call(), expected)
            except Exception as failure:  # torch.compile's failure is a result; ours would be a defect
                if name != "torch.compile":
                    raise
                console.print(f"torch.compile fails: {type(failure).__name__}", style="yellow")
                continue
            calls[name] = call
        times = race(calls, budget_s=seconds)
    for name, timing in times.items():
        table.add_row(
            name,
            f"{timing.median * 1e3:.2f}",
            f"{timing.best * 1e3:.2f}",
            f"{timing.median / times[EAGER].median:.2f}",
            f"{errors[name]:.1e}",
        )
    return table


def _engine_choices() -> list[tuple[str, list[str] | None]]:
    """A label and `engines=` for each plan: every usable engine alone, and the default."""
    usable = [
        engine.name
        for engine in default_engines()
        if engine.unavailable() is None and engine.name != "pytorch"
    ]
    if not usable:
        return [("PyTorch alone", None)]
    alone: list[tuple[str, list[str] | None]] = [(f"{name} alone", [name]) for name in usable]
    return [*alone, ("measured", None)]


def _call(peer: Callable[..., Any], specimen: Specimen) -> Callable[[], Any]:
    return lambda: peer(*specimen.args, **specimen.kwargs)
