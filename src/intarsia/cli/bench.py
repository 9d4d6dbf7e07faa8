"""`intarsia demo` and `intarsia bench`: the times of a model on every engine, PyTorch and torch.compile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

from intarsia.choose.measured import Measured, Objective
from intarsia.choose.race import callers, race_plans
from intarsia.cli.zoo import Specimen
from intarsia.compare import relative_error
from intarsia.engines import NetworkEngine, RuntimeFile, default_engines, known_engines
from intarsia.errors import error_text
from intarsia.logs import working
from intarsia.timing import Timing, race

EAGER, TORCH_COMPILE = "PyTorch eager", "torch.compile"


@dataclass(frozen=True)
class Comparison:
    """The time and the error of each peer, with the plan and the notes of the compiled modules."""

    model: str
    measure: str  # what a time is: of one call, a share of calls at once, or of several lengths
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
        setting = {
            "model": self.model,
            "measure": self.measure,
            "weights": self.weights,
            "threads": self.threads,
        }
        return {**setting, "peers": peers, "failed": dict(self.failed), "notes": list(self.notes)}


def compare(
    specimen: Specimen,
    options: Mapping[str, Any] | None = None,
    *,
    torch_compile: bool = False,
    seconds: float = 20.0,
    objective: Objective = "latency",
    exported: bool = False,
) -> Comparison:
    """Compile a model for each engine alone and with the measured plan, and time all of them in turns.

    Dynamic sizes are timed at three lengths: the example's, a half and a quarter. For "throughput", several
    threads call at the same time, and the time is divided by the number of calls.
    """
    model, options = specimen.module, dict(options or {})
    if objective == "throughput":
        options.setdefault("partition", Measured(objective))
    varies = specimen.dynamic_shapes is not None and "attention_mask" in specimen.kwargs
    calls_of = [specimen, specimen.shortened(2), specimen.shortened(4)] if varies else [specimen]
    failed: dict[str, str] = {}
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
    if exported:
        others, failed = _exported_peers(specimen)
        peers |= others
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    with torch.no_grad():
        expected = [model(*one.args, **one.kwargs) for one in calls_of]
        for name, peer in peers.items():
            call = _call(peer, calls_of)
            try:
                with working(f"running {name}"):
                    errors[name] = _error(call(), expected)
            except Exception as error:  # a failure of another peer is a result; one of ours is a defect
                if name.startswith("intarsia") or name == EAGER:
                    raise
                failed[name] = error_text(error)
                continue
            calls[name] = call
        with working(f"timing {len(calls)} peers", seconds):
            times = _timed(calls, objective, seconds)
    weights = sum(p.numel() for p in model.parameters())
    kind = type(specimen.model).__name__
    measure = "latency" if objective == "latency" else f"time per call of {callers()} callers"
    measure += f" of {len(calls_of)} lengths together" if len(calls_of) > 1 else ""
    threads = torch.get_num_threads()
    return Comparison(kind, measure, weights, threads, times, errors, plan, tuple(notes), failed)


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
    error = "the largest difference from eager as a share of the largest output"
    table = Table(title=f"{comparison.measure}, and {error}")
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


def _call(peer: Callable[..., Any], specimens: Sequence[Specimen]) -> Callable[[], list[Any]]:
    return lambda: [peer(*one.args, **one.kwargs) for one in specimens]


def _timed(calls: Mapping[str, Callable[[], Any]], objective: Objective, seconds: float) -> dict[str, Timing]:
    if objective == "latency":
        return race(calls, budget_s=seconds)
    rounds = race_plans(calls, objective, rounds=30, budget_s=seconds)
    return {name: Timing(median(s), min(s), len(s), s) for name, s in rounds.items()}


def _error(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest error, by tensors in order: the runtime of a file returns a flat list of tensors."""
    pairs = [[_tensors(one) for one in side] for side in (outputs, expected)]
    return max(relative_error(tensors, references) for tensors, references in zip(*pairs, strict=True))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _exported_peers(specimen: Specimen) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The model exported by `torch.onnx.export`, in each runtime that reads it; and the errors of others."""
    peers: dict[str, Callable[..., Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            with working("exporting by torch.onnx"):
                specimen.export_onnx(path)
        except Exception as error:
            return {}, {"torch.onnx.export": error_text(error)}
        for name, kind in known_engines().items():
            if not issubclass(kind, NetworkEngine) or kind.based_on is not None:
                continue
            if kind.open is NetworkEngine.open:
                continue  # the engine reads no files
            label, engine = f"torch.onnx + {name}", kind()
            if engine.unavailable() is None:
                try:
                    peers[label] = as_peer(engine.open(path))
                except Exception as error:
                    failed[label] = error_text(error)
    return peers, failed


def as_peer(file: RuntimeFile) -> Callable[..., list[torch.Tensor]]:
    """A runtime's file, called with the model's arguments."""

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        values = [x.numpy() for x in _tensors((args, kwargs))]
        results = file.run(dict(zip(file.inputs, values, strict=True)))
        return [torch.from_numpy(array) for array in results]

    return run
