"""`intarsia tune script.py`: a script nobody edits, its modules compiled while it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from intarsia.errors import IntarsiaError
from intarsia.tuning.script import ScriptTuner, run_script


def tune(
    script: Annotated[str, typer.Argument(help="a Python script")],
    args: Annotated[list[str] | None, typer.Argument(help="the script's own arguments")] = None,
    after: Annotated[int, typer.Option(help="calls of a module that are recorded before it is compiled")] = 3,
    engines: Annotated[str | None, typer.Option(help="engines, separated by commas")] = None,
    always: Annotated[bool, typer.Option(help="keep programs that are not faster, too")] = False,
) -> None:
    """Run a script with its modules compiled: recorded, verified on the recorded calls, put in place."""
    options: dict[str, Any] = {} if engines is None else {"engines": engines.split(",")}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        tuner = ScriptTuner(after, options, only_if_faster=not always)
        status = run_script(script, args or [], tuner)
    except IntarsiaError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    console.print(f"{sum(w.placed is not None for w in tuner.watched.values())} modules were compiled")
    for item in tuner.watched.values():
        console.print(f"  {item}", markup=False)
    sys.stdout.flush()
    raise typer.Exit(status)
