"""`intarsia run`: a saved module on inputs from a file, or random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intarsia.errors import InputError
from intarsia.timing import race


def run(
    file: Annotated[Path, typer.Argument(help="what intarsia.save wrote")],
    inputs: Annotated[
        Path | None, typer.Option(help=".npz or .safetensors with the inputs by name; random where not given")
    ] = None,
    outputs: Annotated[Path | None, typer.Option(help="write outputs there, .npz or .safetensors")] = None,
    size: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, a size of random inputs")] = None,
    seed: Annotated[int, typer.Option(help="of random inputs")] = 0,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="a module that defines types or operators in it"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="calls to time; 0 for none", min=0)] = 10,
) -> None:
    """Run a saved module once, print its outputs, and time it."""
    from intarsia.serve.interface import load_interface
    from intarsia.serve.run import drawn, read, summary, write

    if outputs is not None and outputs.suffix not in (".npz", ".safetensors"):
        raise InputError(f"{outputs} is neither .npz nor .safetensors")
    if inputs is not None and size:
        raise InputError("inputs from a file have their sizes; --size is for random ones")
    interface = load_interface(file, imports or ())
    given = drawn(interface, _sizes(size or []), seed) if inputs is None else read(inputs, interface)
    answer = interface.call(given)
    for name, value in answer.items():
        typer.echo(summary(name, value))
    if outputs is not None:
        write(outputs, answer)
    if rounds and interface.stateful:
        typer.echo("not timed: a call changes the module's buffers or its inputs")
    elif rounds:
        flat = interface.prepared(given)
        timing = race({"call": lambda: interface.run(flat)}, rounds=rounds, warmup=1)["call"]
        typer.echo(
            f"median {timing.median * 1e3:.3f} ms, best {timing.best * 1e3:.3f} ms of {timing.rounds} rounds"
        )


def _sizes(given: list[str]) -> dict[str, int]:
    found = {}
    for item in given:
        name, _, number = item.partition("=")
        if not number.isdecimal():
            raise InputError(f"--size {item} is not of the form NAME=NUMBER")
        found[name] = int(number)
    return found
