"""Arguments and options that several commands share, and how their results are printed."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any

import typer

from intarsia.errors import InputError


def complete_architecture(word: str) -> list[str]:
    """The names of the zoo that begin with `word`. They are read from its file: an import takes a second."""
    zoo = Path(__file__).with_name("zoo.py").read_text(encoding="utf-8")
    return [name for name in re.findall(r"^@_maker\ndef _(\w+)", zoo, re.M) if name.startswith(word)]


def complete_model(word: str) -> list[str]:
    """The names of the zoo, and the files and folders, that begin with `word`."""
    paths = [f"{path}/" if os.path.isdir(path) else path for path in glob(f"{escape(word)}*")]
    ends = ("/", ".py", ".pt2", ".intarsia")
    return [*complete_architecture(word), *(path for path in paths if path.endswith(ends))]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="FILE.py:FUNCTION or MODULE:FUNCTION, where the function returns (model, args) or"
        " (model, args, kwargs); a .pt2 file; a file of intarsia.save; a Hugging Face folder or model type;"
        " or a name that `intarsia demo --list` prints.",
    ),
]
Archive = Annotated[
    Path, typer.Argument(metavar="FILE", help="File that `intarsia compile` or intarsia.save wrote.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="Module that defines types or operators that the file uses."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Full = Annotated[bool, typer.Option(help="Use the published size of an architecture, not a small one.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|float16|bfloat16",
        help="The dtype of a Hugging Face folder; packed weights stay packed.",
    ),
]
Engines = Annotated[str | None, typer.Option(help="Engines to use, separated by commas.")]
Budget = Annotated[
    float | None, typer.Option(help="Seconds to spend on measuring plans.", min=0.1, metavar="SECONDS")
]
Ranges = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="INPUT.DIM=MIN:MAX",
        help="Range of a size, such as x.0=1:32. Sizes that are always equal share one option:"
        " ids.0,mask.0=1:32.",
    ),
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        "-O",
        "--option",
        metavar="NAME=VALUE",
        help="Any other option of intarsia.compile, such as tolerance=0.02.",
    ),
]

_LISTS = ("torch_executed_ops", "torch_executed_modules", "backend_priority")  # names, separated by commas


def compile_options(
    engines: str | None = None, budget: float | None = None, choices: Sequence[str] | None = None
) -> dict[str, Any]:
    """The keyword arguments of `intarsia.compile` for these command-line options, checked.

    >>> compile_options("onnxruntime, pytorch", None, ["min_block_size=1", "partition=greedy"])
    {'min_block_size': 1, 'partition': 'greedy', 'engines': ['onnxruntime', 'pytorch']}
    >>> compile_options(choices=["torch_executed_ops=aten::gelu,aten::relu"])
    {'torch_executed_ops': ['aten::gelu', 'aten::relu']}
    """
    from intarsia.choose import Measured
    from intarsia.options import CompileOptions

    options: dict[str, Any] = {}
    for choice in choices or ():
        name, equals, value = choice.partition("=")
        if not equals:
            raise InputError(f"-O {choice} is not of the form NAME=VALUE")
        name, parsed = name.replace("-", "_"), _value(value)
        is_list = name in _LISTS and isinstance(parsed, str)
        options[name] = [item.strip() for item in value.split(",")] if is_list else parsed
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


def check_writable(path: Path | None) -> None:
    """Raise InputError if the file cannot be written. Call it before the work whose result goes there."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"you do not have permission to write to the folder {path.parent}")


def print_json(content: Any, *, error: bool = False) -> None:
    """Print a result as JSON to stdout, or to stderr with `error`."""
    typer.echo(json.dumps(content, indent=2, default=str), err=error)
