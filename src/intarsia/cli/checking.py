"""`intarsia check | diff`: whether a candidate computes the same as a model, and where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intarsia.cli.arguments import (
    AsJson,
    Choices,
    Dtype,
    Engines,
    Full,
    Model,
    Ranges,
    check_writable,
    compile_options,
    print_json,
)
from intarsia.errors import InputError

if TYPE_CHECKING:
    from intarsia.cli.zoo import Specimen

DIFFERS = 1

Against = Annotated[
    str | None,
    typer.Option(
        metavar="CANDIDATE",
        help="An .onnx, .xml (OpenVINO) or .pt2 file, a file of intarsia.save, or FILE.py:FUNCTION, where the"
        " function takes the model and returns a callable. Default: the model compiled by Intarsia.",
    ),
]


def check(
    model: Model,
    against: Against = None,
    engines: Engines = None,
    ranges: Ranges = None,
    choices: Choices = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Allowed error, as a share of the largest value.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Number of random inputs to compare on.", min=0)] = 3,
    edges: Annotated[
        bool, typer.Option(help="Compare also on zeros, infinity, NaN and other edge values.")
    ] = True,
    reproduction: Annotated[
        Path, typer.Option(help="File for the first node that differs, with its inputs.")
    ] = Path("reproduction.pt2"),
    full: Full = False,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Compare a candidate with the model. Name the first node that differs.

    Both run on the example, on random inputs, on edge values and at the ends of size ranges. The exit code is
    1 if an answer differs by more than rounding.
    """
    from intarsia.cli.model import resolve
    from intarsia.report.check import check as check_candidate

    check_writable(reproduction)
    specimen = resolve(model, full=full, ranges=ranges, dtype=dtype)
    options = compile_options(engines, None, choices)
    candidate = _candidate(model, specimen, against, options)
    report = check_candidate(
        specimen.model,
        specimen.args,
        candidate,
        specimen.kwargs,
        dynamic_shapes=specimen.dynamic_shapes,
        tolerance=tolerance,
        draws=draws,
        edges=edges,
        reproduction=reproduction,
    )
    print_json(report.as_dict()) if json else typer.echo(str(report))
    if not report.equal:
        raise typer.Exit(DIFFERS)


def diff(
    model: Model,
    engines: Engines = None,
    ranges: Ranges = None,
    choices: Choices = None,
    full: Full = False,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Show the error of each segment of a compiled model.

    The exit code is 1 if a segment differs by more than rounding when it gets exact inputs.
    """
    from intarsia.cli.model import compiled_file, resolve
    from intarsia.report.diff import diff as diff_segments
    from intarsia.runtime import Compiled

    specimen = resolve(model, full=full, ranges=ranges, dtype=dtype)
    options = compile_options(engines, None, choices)
    compiled = compiled_file(model) or specimen.compile(**options)
    if not isinstance(compiled, Compiled):
        raise InputError(f"{model} is compiled in parts; give one of them")
    report = diff_segments(compiled, specimen.args, specimen.kwargs)
    print_json(report.as_dict()) if json else typer.echo(str(report))
    if not report.equal:
        raise typer.Exit(DIFFERS)


def _candidate(name: str, specimen: Specimen, against: str | None, options: dict[str, Any]) -> Any:
    from intarsia.cli.model import call_factory, compiled_file

    if against is None:
        return compiled_file(name) or specimen.compile(**options)
    place, colon, function = against.rpartition(":")
    if not colon:
        return against
    candidate = call_factory(place, function, specimen.module)
    if not callable(candidate):
        raise InputError(f"{against} must return a callable, not a {type(candidate).__name__}")
    return candidate
