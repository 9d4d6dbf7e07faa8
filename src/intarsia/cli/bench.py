"""`intarsia demo` and `intarsia bench`: the times of a model on every engine, PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.engines import default_engines
from intarsia.errors import error_text
from intarsia.logs import working
from intarsia.timing import Timing, race

EAGER, TORCH_COMPILE = "PyTorch eager", "torch.compile"


@dataclass(frozen=True)
class Comparison:
    """The time and the error of each peer, with the plan and the notes of the compiled modules."""

    model: str
    weights: int
    threads: int
    times: Mapping[str, Timing]
    errors: Mapping[str, float]
    plan: str
    notes: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        peers = {
            name: {
                "median_ms": timing.median * 1e3,
                "best_ms": timing.best * 1e3,
                "of_eager": timing.median / self.times[EAGER].median,
                "error": self.errors[name],
            }
            for name, timing in self.times.items()
        }
        setting = {"model": self.model, "weights": self.weights, "threads": self.threads}
        return {**setting, "peers": peers, "failed": dict(self.failed), "notes": list(self.notes)}


def compare(
    specimen: Specimen,
    options: Mapping[str, Any] | None = None,
    *,
    torch_compile: bool = False,
    seconds: float = 20.0,
) -> Comparison:
    """Compile a model for each engine alone and with the measured plan, and time all of them in turns."""
    model, options = specimen.module, dict(options or {})
    peers: dict[str, Callable[..., Any]] = {EAGER: model}
    if torch_compile:
        peers[TORCH_COMPILE] = torch.compile(model)
    notes: list[str] = []
    plan = ""
    for label, engines in _engine_choices(options.pop("engines", None)):
        compiled = specimen.compile(engines=engines, **options)
        peers[f"intarsia, {label}"] = compiled
        notes += [note for note in compiled.notes if note not in notes]
        plan = str(getattr(compiled, "plan", compiled))
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    with torch.no_grad():
        expected = model(*specimen.args, **specimen.kwargs)
        for name, peer in peers.items():
            call = _call(peer, specimen)
            try:
                with working(f"running {name}"):
                    errors[name] = relative_error(call(), expected)
            except Exception as error:  # a failure of torch.compile is a result, any other is a defect
                if name != TORCH_COMPILE:
                    raise
                failed[name] = error_text(error)
                continue
            calls[name] = call
        with working(f"timing {len(calls)} peers", seconds):
            times = race(calls, budget_s=seconds)
    weights = sum(p.numel() for p in model.parameters())
    kind = type(specimen.model).__name__
    return Comparison(kind, weights, torch.get_num_threads(), times, errors, plan, tuple(notes), failed)


def print_comparison(comparison: Comparison, *, plan: bool = False) -> None:
    """Print the notes, the last plan (with `plan`), and a table of times and errors."""
    console = Console()
    setting = f"{comparison.weights / 1e6:.1f} M weights, {comparison.threads} threads"
    console.print(f"[bold]{comparison.model}[/], {setting}")
    for note in comparison.notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    for name, reason in comparison.failed.items():
        console.print(f"{name} fails: {reason}", style="yellow", markup=False, soft_wrap=True)
    if plan:
        console.print(comparison.plan, highlight=False, markup=False, soft_wrap=True)
    table = Table(title="latency, and the largest difference from eager as a share of the largest output")
    for column in ("", "median ms", "best ms", "of eager", "error"):
        table.add_column(column, justify="left" if not column else "right")
    eager = comparison.times[EAGER].median
    for name, timing in comparison.times.items():
        milliseconds = f"{timing.median * 1e3:.2f}", f"{timing.best * 1e3:.2f}"
        table.add_row(name, *milliseconds, f"{timing.median / eager:.2f}", f"{comparison.errors[name]:.1e}")
    console.print(table)


def _engine_choices(chosen: list[str] | None) -> list[tuple[str, list[str] | None]]:
    """A label and `engines=` for each plan: each chosen (or usable) engine alone, and then all of them."""
    usable = chosen or [
        engine.name
        for engine in default_engines()
        if engine.unavailable() is None and engine.name != "pytorch"
    ]
    if not usable:
        return [("PyTorch alone", None)]
    alone: list[tuple[str, list[str] | None]] = [(f"{name} alone", [name]) for name in usable]
    return [*alone, ("measured", chosen)]


def _call(peer: Callable[..., Any], specimen: Specimen) -> Callable[[], Any]:
    return lambda: peer(*specimen.args, **specimen.kwargs)
