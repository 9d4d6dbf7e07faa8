"""`intarsia run | serve | tune`: commands that run a saved module, or a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from intarsia.cli.arguments import Archive, AsJson, Choices, Engines, Imports, compile_options, print_json
from intarsia.errors import InputError


def run(
    file: Archive,
    inputs: Annotated[
        Path | None, typer.Option(help=".npz or .safetensors with the inputs by name; random where not given")
    ] = None,
    outputs: Annotated[Path | None, typer.Option(help="write outputs there, .npz or .safetensors")] = None,
    size: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, a size of random inputs")] = None,
    seed: Annotated[int, typer.Option(help="of random inputs")] = 0,
    imports: Imports = None,
    rounds: Annotated[int, typer.Option(help="calls to time; 0 for none", min=0)] = 10,
    json: AsJson = False,
) -> None:
    """Run a saved module once, print its outputs, and time it."""
    from intarsia.serve.interface import load_interface
    from intarsia.serve.run import drawn, read, summary, write
    from intarsia.timing import race

    if outputs is not None and outputs.suffix not in (".npz", ".safetensors"):
        raise InputError(f"{outputs} is neither .npz nor .safetensors")
    if inputs is not None and size:
        raise InputError("inputs from a file have their sizes; --size is for random ones")
    interface = load_interface(file, imports or ())
    arguments = drawn(interface, _sizes(size or []), seed) if inputs is None else read(inputs, interface)
    answer = interface.call(arguments)
    lines = [summary(name, value) for name, value in answer.items()]
    if outputs is not None:
        write(outputs, answer)
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
            f"median {timing.median * 1e3:.3f} ms, best {timing.best * 1e3:.3f} ms of {timing.rounds} rounds"
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


def serve(
    file: Archive,
    host: Annotated[str, typer.Option(help="0.0.0.0 for every interface")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free", min=0, max=65535)] = 8000,
    max_batch: Annotated[int, typer.Option(help="rows that may share a call; 1 for no batching")] = 32,
    wait_ms: Annotated[
        float, typer.Option(help="a request waits so long for others to share its call")
    ] = 2.0,
    queue: Annotated[int, typer.Option(help="requests taken and not answered; beyond, 503")] = 256,
    max_body: Annotated[int, typer.Option(help="bytes of a request; beyond, 413")] = 64 * 2**20,
    max_held: Annotated[int, typer.Option(help="bytes of all requests not answered; beyond, 503")] = 512
    * 2**20,
    read_s: Annotated[float, typer.Option(help="how long a client may take to send a request")] = 30.0,
    answer_s: Annotated[float, typer.Option(help="a request without an answer then gets 504")] = 60.0,
    linger_s: Annotated[float, typer.Option(help="how long a stopping server refuses in words")] = 1.0,
    stop_s: Annotated[float, typer.Option(help="how long it waits for what it has taken")] = 30.0,
    workers: Annotated[int, typer.Option(help="processes")] = 1,
    connections: Annotated[int, typer.Option(help="open at once; beyond, 503")] = 1000,
    imports: Imports = None,
) -> None:
    """Serve a saved module: POST /predict, GET /, /health and /metrics."""
    try:
        from intarsia.serve.app import Options
        from intarsia.serve.server import serve as serve_file
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("intarsia"):
            raise
        raise InputError(f"serving needs {error.name}: pip install 'intarsia[serve]'") from error

    serve_file(
        str(file),
        Options(
            host=host,
            port=port,
            max_batch=max_batch,
            wait_ms=wait_ms,
            queue=queue,
            max_body=max_body,
            max_held=max_held,
            read_s=read_s,
            answer_s=answer_s,
            linger_s=linger_s,
            stop_s=stop_s,
            workers=workers,
            connections=connections,
            imports=tuple(imports or ()),
        ),
    )


def tune(
    script: Annotated[str, typer.Argument(help="a Python script")],
    args: Annotated[list[str] | None, typer.Argument(help="the script's own arguments")] = None,
    after: Annotated[int, typer.Option(help="calls of a module that are recorded before it is compiled")] = 3,
    engines: Engines = None,
    choices: Choices = None,
    always: Annotated[bool, typer.Option(help="keep programs that are not faster, too")] = False,
    json: Annotated[bool, typer.Option("--json", help="write what was done to stderr as JSON")] = False,
) -> None:
    """Run a script with its modules compiled: recorded, verified on the recorded calls, put in place."""
    from rich.console import Console

    from intarsia.tuning.script import ScriptTuner, run_script

    options: dict[str, Any] = compile_options(engines, None, choices)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tuner = ScriptTuner(after, options, only_if_faster=not always)
    status = run_script(script, args or [], tuner)
    count = sum(watched.placed is not None for watched in tuner.watched.values())
    if json:
        print_json({"compiled": count, "modules": list(map(str, tuner.watched.values()))}, error=True)
    else:
        console.print(f"{count} modules were compiled")
        for item in tuner.watched.values():
            console.print(f"  {item}", markup=False)
    sys.stdout.flush()
    raise typer.Exit(status)
