"""`intarsia demo` and `intarsia bench`: a model on every engine, timed beside PyTorch and torch.compile."""

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
    """What each peer took and how far it is off, with the plan and the notes of what was compiled."""

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
        about = {"model": self.model, "weights": self.weights, "threads": self.threads}
        return {**about, "peers": peers, "failed": dict(self.failed), "notes": list(self.notes)}


def compare(
    specimen: Specimen,
    options: Mapping[str, Any] | None = None,
    *,
    torch_compile: bool = False,
    seconds: float = 20.0,
) -> Comparison:
    """Compile a model on each engine alone and on the measured plan, and time all of them in turns."""
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
            except Exception as failure:  # torch.compile's failure is a result; ours would be a defect
                if name != TORCH_COMPILE:
                    raise
                failed[name] = error_text(failure)
                continue
            calls[name] = call
        with working(f"timing {len(calls)} peers", seconds):
            times = race(calls, budget_s=seconds)
    weights = sum(p.numel() for p in model.parameters())
    kind = type(specimen.model).__name__
    return Comparison(kind, weights, torch.get_num_threads(), times, errors, plan, tuple(notes), failed)


def print_comparison(comparison: Comparison, *, plan: bool = False) -> None:
    """The comparison as a table, below the notes and, if asked for, the plan that was used last."""
    console = Console()
    about = f"{comparison.weights / 1e6:.1f} M weights, {comparison.threads} threads"
    console.print(f"[bold]{comparison.model}[/], {about}")
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


def _engine_choices(asked: list[str] | None) -> list[tuple[str, list[str] | None]]:
    """A label and `engines=` for each plan: each engine asked for or usable, and then all of them."""
    usable = asked or [
        engine.name
        for engine in default_engines()
        if engine.unavailable() is None and engine.name != "pytorch"
    ]
    if not usable:
        return [("PyTorch alone", None)]
    alone: list[tuple[str, list[str] | None]] = [(f"{name} alone", [name]) for name in usable]
    return [*alone, ("measured", asked)]


def _call(peer: Callable[..., Any], specimen: Specimen) -> Callable[[], Any]:
    return lambda: peer(*specimen.args, **specimen.kwargs)
