"""`intarsia bench`: whole models against eager, torch.compile, torch.onnx and OpenVINO, a process each."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from intarsia.cli import bench_models
from intarsia.cli.bench_chart import chart
from intarsia.cli.bench_docs import cell, compile_seconds, fill_documents
from intarsia.cli.bench_peers import OURS, OWN, PEERS, Wish, command
from intarsia.errors import IntarsiaError


def bench(
    models: Annotated[
        list[str] | None, typer.Argument(help="models by name; all where none is named")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="where results are kept; a model that is there is not run")
    ] = Path("bench-results"),
    limit: Annotated[float, typer.Option(help="seconds a model may take", min=1)] = 900.0,
    budget: Annotated[float, typer.Option(help="seconds of a longer search; 0 for none", min=0)] = 60.0,
    tolerance: Annotated[float, typer.Option(help="error of one more plan; 0 for none", min=0, max=1)] = 0.0,
    rounds: Annotated[int, typer.Option(help="rounds of a race", min=3)] = 40,
    inductor: Annotated[bool, typer.Option(help="run torch.compile too, which takes minutes")] = True,
    full: Annotated[bool, typer.Option(help="the size a model is known by")] = True,
    docs: Annotated[
        Path | None, typer.Option(help="folder whose choosing.md and measurements.md are filled in")
    ] = None,
) -> None:
    """Measure models against their peers, as JSON and a chart; a run that was stopped goes on."""
    console = Console(width=150, soft_wrap=True)
    named = models or bench_models.names()
    for name in named:
        if name not in bench_models.names():
            raise IntarsiaError(f"there is no model {name!r}; known are {', '.join(bench_models.names())}")
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in named:
        path = out / f"{name}.json"
        if not _is_done(path):
            wish = Wish(name, full, rounds, budget, inductor=inductor, tolerance=tolerance)
            reason = _run(wish, path, limit)
            console.print(f"{name}: {reason or 'measured'}", markup=False, highlight=False)
        results.append(_read(path, name))
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "chart.svg").write_text(chart(results))
    if docs is not None:
        fill_documents(docs, results, summary(results))
    console.print(table(results))
    console.print(summary(results), highlight=False)


def _run(wish: Wish, path: Path, limit: float) -> str | None:
    """Measure one model; what went wrong, if something did, which is kept with what was measured."""
    try:
        done = subprocess.run(command(wish, path), timeout=limit, capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines()
        reason = None if done.returncode == 0 else (lines[-1] if lines else f"ended with {done.returncode}")
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:g} s"
    if reason is not None:
        kept = _read(path, wish.name)
        path.write_text(json.dumps({**kept, "stopped": reason}, indent=1))
    return reason


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) and "peers" in found else {"name": name, "peers": {}}


def _is_done(path: Path) -> bool:
    kept = _read(path, "")
    return bool(kept.get("complete") or kept.get("stopped"))


def ratio(result: Mapping[str, Any]) -> float | None:
    """The best peer's time over ours: above 1, we are faster.

    >>> ratio({"peers": {"eager": {"median_ms": 3.0}, "intarsia": {"median_ms": 2.0}}})
    1.5
    """
    times = {name: peer["median_ms"] for name, peer in result["peers"].items() if "median_ms" in peer}
    peers = [times[name] for name in PEERS if name in times]
    return min(peers) / times[OURS] if OURS in times and peers else None


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for every model, times in milliseconds."""
    made = Table(
        title="median ms a call; error is ours against eager; compile: fixed order, cold, with known costs"
    )
    for column in ("model", *PEERS, *OWN, "best peer / ours", "error", "compile s"):
        made.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        peers = result["peers"]
        cells = [cell(peers.get(name)) for name in (*PEERS, *OWN)]
        own, best = peers.get(OURS, {}), ratio(result)
        error = own.get("error")
        made.add_row(
            str(result["name"]),
            *cells,
            "-" if best is None else f"{best:.2f}",
            "-" if error is None else f"{error:.0e}",
            ", ".join("-" if seconds is None else f"{seconds:.1f}" for seconds in compile_seconds(result)),
        )
    return made


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """The geometric mean and the worst case against the best peer of each model."""
    found = {result["name"]: best for result in results if (best := ratio(result)) is not None}
    if not found:
        return "nothing was measured"
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    worst = min(found, key=found.__getitem__)
    return (
        f"{len(found)} models: best peer / ours {mean:.3f} in the geometric mean,"
        f" {found[worst]:.2f} at worst ({worst})"
    )
