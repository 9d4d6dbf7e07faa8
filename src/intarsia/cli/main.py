"""The command line: `intarsia demo | bench | explain | engines | run | serve | pipeline | tune`.

A command imports what it needs when it runs: `intarsia --help` loads neither torch nor an engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from intarsia.cli.pipeline import app as pipeline_app
from intarsia.errors import InputError, IntarsiaError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.partition("\n")[0])
app.add_typer(pipeline_app, name="pipeline")

Model = Annotated[
    str,
    typer.Argument(
        help="an architecture of `intarsia demo --list`, or file.py:function or module:function; the function"
        " returns (model, args) or (model, args, kwargs)"
    ),
]
Archive = Annotated[Path, typer.Argument(help="a file that intarsia.save wrote")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="a module that defines types or operators which the file uses"),
]


@app.command()
def demo(
    architecture: Annotated[str, typer.Argument(help="an architecture of `--list`")] = "bert",
    full: Annotated[bool, typer.Option(help="the size it is known by; --no-full for a small one")] = True,
    list_: Annotated[bool, typer.Option("--list", help="name the architectures and stop")] = False,
) -> None:
    """Compile a real architecture on every engine; print plan, correctness and latency side by side."""
    from intarsia.cli import zoo
    from intarsia.cli.bench import compare

    if list_:
        typer.echo("\n".join(zoo.names()))
        return
    compare(zoo.specimen(architecture, full=full), print_plan=True)


@app.command()
def bench(
    model: Model,
    full: Annotated[bool, typer.Option(help="the size an architecture is known by")] = True,
    torch_compile: Annotated[bool, typer.Option(help="torch.compile too, which may take minutes")] = True,
    seconds: Annotated[float, typer.Option(help="how long the plans are timed", min=0.1)] = 20.0,
) -> None:
    """Time a model compiled on every engine beside eager PyTorch and torch.compile."""
    from intarsia.cli.bench import compare
    from intarsia.cli.zoo import model_of

    compare(model_of(model, full=full), torch_compile=torch_compile, seconds=seconds)


@app.command()
def engines() -> None:
    """Which engines this machine has, and what to install for the others."""
    from rich.console import Console
    from rich.table import Table

    from intarsia.engines import known_engines

    table = Table()
    table.add_column("engine")
    table.add_column("usable")
    for name, kind in known_engines().items():
        table.add_row(name, kind().unavailable() or "yes")
    Console().print(table)


@app.command()
def explain(
    model: Model,
    full: Annotated[bool, typer.Option(help="the size an architecture is known by")] = False,
    json: Annotated[bool, typer.Option(help="print JSON")] = False,
) -> None:
    """What would run where, and why; no engine is built."""
    from rich.console import Console

    from intarsia.cli.zoo import model_of
    from intarsia.report import explain as explain_model

    specimen = model_of(model, full=full)
    report = explain_model(specimen.model, specimen.args, specimen.kwargs)
    if json:
        typer.echo(report.to_json())
    else:
        Console().print(report)


@app.command()
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
    for name, value in answer.items():
        typer.echo(summary(name, value))
    if outputs is not None:
        write(outputs, answer)
    if rounds and interface.stateful:
        typer.echo("not timed: a call changes the module's buffers or its inputs")
    elif rounds:
        flat = interface.prepared(arguments)
        timing = race({"call": lambda: interface.run(flat)}, rounds=rounds, warmup=1)["call"]
        typer.echo(
            f"median {timing.median * 1e3:.3f} ms, best {timing.best * 1e3:.3f} ms of {timing.rounds} rounds"
        )


def _sizes(options: list[str]) -> dict[str, int]:
    sizes = {}
    for option in options:
        name, _, number = option.partition("=")
        if not number.isdecimal():
            raise InputError(f"--size {option} is not of the form NAME=NUMBER")
        sizes[name] = int(number)
    return sizes


@app.command()
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
        from intarsia.serve.options import Options
        from intarsia.serve.server import serve as serve_file
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("intarsia"):
            raise
        raise IntarsiaError(f"serving needs {error.name}: pip install 'intarsia[serve]'") from error

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


# The arguments after the script belong to the script.
@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def tune(
    script: Annotated[str, typer.Argument(help="a Python script")],
    args: Annotated[list[str] | None, typer.Argument(help="the script's own arguments")] = None,
    after: Annotated[int, typer.Option(help="calls of a module that are recorded before it is compiled")] = 3,
    engines: Annotated[str | None, typer.Option(help="engines, separated by commas")] = None,
    always: Annotated[bool, typer.Option(help="keep programs that are not faster, too")] = False,
) -> None:
    """Run a script with its modules compiled: recorded, verified on the recorded calls, put in place."""
    from rich.console import Console

    from intarsia.tuning.script import ScriptTuner, run_script

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
    typer.secho(sentence, fg="red", err=True)
    raise SystemExit(1) from None
