"""`intarsia run | serve | tune`: commands that run a saved module, or a script."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from intarsia.cli.arguments import (
    Archive,
    AsJson,
    Choices,
    Engines,
    Imports,
    check_writable,
    compile_options,
    print_json,
)
from intarsia.errors import InputError
from intarsia.serve import Options


def run(
    file: Archive,
    inputs: Annotated[
        Path | None,
        typer.Option(help="File with the inputs by name, .npz or .safetensors. Default: random inputs."),
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(help="Write the outputs to this .npz or .safetensors file.")
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER: a size of the random inputs.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    imports: Imports = None,
    rounds: Annotated[int, typer.Option(help="Number of calls to time; 0 for none.", min=0)] = 10,
    json: AsJson = False,
) -> None:
    """Run a compiled file once, print a summary of its outputs, and time it."""
    from intarsia.serve.interface import drawn, load_interface, read, summary, write
    from intarsia.timing import race

    check_writable(outputs)
    if outputs is not None and outputs.suffix not in (".npz", ".safetensors"):
        raise InputError(f"{outputs} is neither .npz nor .safetensors")
    if inputs is not None and size:
        raise InputError("--size is for random inputs; inputs from a file have sizes")
    interface = load_interface(file, imports or ())
    arguments = drawn(interface, _sizes(size or []), seed) if inputs is None else read(inputs, interface)
    results = interface.call(arguments)
    lines = [summary(name, value) for name, value in results.items()]
    if outputs is not None:
        write(outputs, results)
    timing = None
    if rounds and not interface.stateful:
        flat = interface.prepared(arguments)
        timing = race({"call": lambda: interface.run(flat)}, rounds=rounds, warmup=1)["call"]
    if json:
        times = None if timing is None else {"median_ms": timing.median * 1e3, "best_ms": timing.best * 1e3}
        print_json({**interface.describe(), "results": lines, "times": times})
        return
    typer.echo("\n".join(lines))
    if timing is not None:
        typer.echo(
            f"median {timing.median * 1e3:.3f} ms, best {timing.best * 1e3:.3f} ms of {timing.rounds} calls"
        )
    elif rounds:
        typer.echo("not timed: a call changes the module's buffers or its inputs")


def _sizes(options: list[str]) -> dict[str, int]:
    sizes = {}
    for option in options:
        name, _, number = option.partition("=")
        if not number.isdecimal():
            raise InputError(f"--size {option} is not of the form NAME=NUMBER")
        sizes[name] = int(number)
    return sizes


def serve(file: Archive, *, imports: Imports = None, json: AsJson = False, **options: Any) -> None:
    """Serve a compiled file over HTTP: POST /predict, GET /, /health and /metrics."""
    try:
        from intarsia.serve.server import serve as serve_file
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("intarsia"):
            raise
        raise InputError(f"serving needs {error.name}: pip install 'intarsia[serve]'") from error

    serve_file(str(file), Options(**options, imports=tuple(imports or ())), as_json=json)


def _with_options(command: Callable[..., None]) -> inspect.Signature:
    """The signature of `serve`, with a parameter for each field of `Options`, for typer."""
    annotated: Any = Annotated  # mypy would read the index of the name itself as a type
    signature = inspect.signature(command, eval_str=True)
    named = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    for field in fields(Options):
        text = annotated[type(field.default), typer.Option(help=field.metadata.get("help"))]
        option = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=text
        )
        named.setdefault(field.name, option)
    return signature.replace(parameters=list(named.values()))


serve.__signature__ = _with_options(serve)  # type: ignore[attr-defined]


def tune(
    script: Annotated[str, typer.Argument(help="Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    after: Annotated[
        int, typer.Option(help="Number of calls of a module to record before it is compiled.")
    ] = 3,
    engines: Engines = None,
    choices: Choices = None,
    always: Annotated[bool, typer.Option(help="Keep compiled modules that are not faster.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write the result to stderr as JSON.")] = False,
) -> None:
    """Run a script and compile its modules while it runs.

    The first calls of a module are recorded. The compiled module is compared on them and then replaces it.
    """
    from rich.console import Console

    from intarsia.tuning.tune import ScriptTuner, run_script

    options: dict[str, Any] = compile_options(engines, None, choices)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tuner = ScriptTuner(after, options, only_if_faster=not always)
    status = run_script(script, args or [], tuner)
    count = sum(watched.placed is not None for watched in tuner.watched.values())
    if json:
        print_json({"compiled": count, "modules": list(map(str, tuner.watched.values()))}, error=True)
    else:
        console.print(f"compiled modules: {count}")
        for item in tuner.watched.values():
            console.print(f"  {item}", markup=False)
    sys.stdout.flush()
    raise typer.Exit(status)
