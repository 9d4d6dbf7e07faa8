"""The command line: `intarsia demo | bench | explain | engines | run | serve | pipeline | tune`."""

from __future__ import annotations

import importlib
import os
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from intarsia.cli import zoo
from intarsia.cli.bench import bench
from intarsia.cli.fuzz import fuzz
from intarsia.cli.run import run
from intarsia.cli.serve import serve
from intarsia.cli.tune import tune
from intarsia.compare import relative_error
from intarsia.compiler import compile
from intarsia.engines import default_engines, known_engines
from intarsia.errors import IntarsiaError
from intarsia.timing import race

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console()

Architecture = Annotated[
    str, typer.Argument(help="an architecture of the zoo; `intarsia demo --list` names them")
]


@app.command()
def demo(
    architecture: Architecture = "bert",
    full: Annotated[bool, typer.Option(help="the size it is known by; --no-full for a small one")] = True,
    list_: Annotated[bool, typer.Option("--list", help="name the architectures and stop")] = False,
) -> None:
    """Compile a real architecture on every engine; print plan, correctness and latency side by side."""
    if list_:
        console.print("\n".join(zoo.names()))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    thing = zoo.specimen(architecture, full=full)
    weights = sum(p.numel() for p in thing.model.parameters())
    console.print(
        f"[bold]{type(thing.model).__name__}[/], {weights / 1e6:.1f} M weights, random; "
        f"{torch.get_num_threads()} threads"
    )
    with torch.no_grad():
        expected = thing.model(*thing.args, **thing.kwargs)
    peers: dict[str, Any] = {"PyTorch eager": thing.model}
    for label, engines in _line_ups():
        compiled = compile(thing.model, thing.args, thing.kwargs, engines=engines)
        peers[f"intarsia, {label}"] = compiled
        for note in compiled.notes:
            console.print(f"[yellow]{note}[/]")
    console.print(str(compiled.plan), highlight=False, markup=False)
    table = Table(title="latency, and the largest difference from eager as a share of the largest output")
    for column in ("", "median ms", "best ms", "of eager", "error"):
        table.add_column(column, justify="left" if not column else "right")
    with torch.no_grad():
        times = race({name: _call(peer, thing) for name, peer in peers.items()}, budget_s=20)
        eager = times["PyTorch eager"].median
        for name, timing in times.items():
            error = relative_error(peers[name](*thing.args, **thing.kwargs), expected)
            table.add_row(
                name,
                f"{timing.median * 1e3:.2f}",
                f"{timing.best * 1e3:.2f}",
                f"{timing.median / eager:.2f}",
                f"{error:.1e}",
            )
    console.print(table)


def _line_ups() -> list[tuple[str, list[str] | None]]:
    usable = [
        engine.name
        for engine in default_engines()
        if engine.unavailable() is None and engine.name != "pytorch"
    ]
    if not usable:
        return [("PyTorch alone", None)]
    alone: list[tuple[str, list[str] | None]] = [(f"{name} alone", [name]) for name in usable]
    return [*alone, ("measured", None)]


def _call(peer: Any, thing: zoo.Specimen) -> Any:
    return lambda: peer(*thing.args, **thing.kwargs)


@app.command()
def engines() -> None:
    """Which engines this machine has, and what to install for the others."""
    table = Table()
    table.add_column("engine")
    table.add_column("usable")
    for name, kind in known_engines().items():
        table.add_row(name, kind().unavailable() or "yes")
    console.print(table)


@app.command()
def explain(
    architecture: Architecture,
    full: Annotated[bool, typer.Option(help="the size it is known by")] = False,
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
) -> None:
    """What would run where, and why; no engine is built."""
    from intarsia.report import explain as explain_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    thing = zoo.specimen(architecture, full=full)
    report = explain_model(thing.model, thing.args, thing.kwargs)
    if json:
        typer.echo(report.to_json())
    else:
        console.print(report)


app.command()(fuzz)
# What follows the script is the script's.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(tune)
app.command()(bench)
app.command()(run)
app.command()(serve)
app.add_typer(importlib.import_module("intarsia.cli.pipeline").app, name="pipeline")


def main() -> None:
    """The entry point: an error a user can act on is one sentence, not a traceback."""
    try:
        app()
    except IntarsiaError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(sentence, style="red", markup=False, highlight=False)
    raise SystemExit(1) from None
