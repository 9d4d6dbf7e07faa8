"""Arguments and options that several commands share, and how their results are printed."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from intarsia.errors import InputError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="FILE.py:FUNCTION or MODULE:FUNCTION, which returns (model, args) or (model, args, kwargs);"
        " a .pt2 file; an archive; a Hugging Face folder or model type; a name of `intarsia demo --list`",
    ),
]
Archive = Annotated[Path, typer.Argument(metavar="FILE", help="a file that intarsia.save wrote")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="a module that defines types or operators which the file uses"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Full = Annotated[bool, typer.Option(help="the published size of an architecture, not a small one")]
Engines = Annotated[str | None, typer.Option(help="engines in order of preference, separated by commas")]
Budget = Annotated[
    float | None, typer.Option(help="seconds for measuring plans; more are tried", min=0.1, metavar="SECONDS")
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "-O",
        "--option",
        metavar="NAME=VALUE",
        help="any other option of intarsia.compile, such as tolerance=0.02",
    ),
]


def compile_options(
    engines: str | None = None, budget: float | None = None, choices: Sequence[str] | None = None
) -> dict[str, Any]:
    """The keyword arguments of `intarsia.compile` that a command line asks for, checked.

    >>> compile_options("onnxruntime, pytorch", None, ["min_block_size=1", "partition=greedy"])
    {'min_block_size': 1, 'partition': 'greedy', 'engines': ['onnxruntime', 'pytorch']}
    """
    from intarsia.choose import Measured
    from intarsia.options import CompileOptions

    options: dict[str, Any] = {}
    for choice in choices or ():
        name, equals, value = choice.partition("=")
        if not equals:
            raise InputError(f"-O {choice} is not of the form NAME=VALUE")
        options[name.replace("-", "_")] = _value(value)
    if engines is not None:
        options["engines"] = [name.strip() for name in engines.split(",") if name.strip()]
    if budget is not None:
        options["partition"] = Measured(budget_s=budget)
    CompileOptions.checked(options, "compile")
    return options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def print_json(content: Any, *, error: bool = False) -> None:
    """A result as JSON, on stdout, or on stderr where stdout belongs to somebody else."""
    typer.echo(json.dumps(content, indent=2, default=str), err=error)
