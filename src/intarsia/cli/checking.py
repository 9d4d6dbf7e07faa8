"""`intarsia check | diff`: whether something computes what a model does, and where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intarsia.cli.arguments import AsJson, Choices, Engines, Full, Model, compile_options, print_json
from intarsia.errors import InputError

if TYPE_CHECKING:
    from intarsia.cli.zoo import Specimen
    from intarsia.runtime import Compiled

DIFFERS = 1

Against = Annotated[
    str | None,
    typer.Option(
        metavar="CANDIDATE",
        help="an .onnx, .xml (OpenVINO) or .pt2 file, an archive, or FILE.py:FUNCTION, which takes the model"
        " and returns a callable; by default the model is compiled, and that is compared",
    ),
]


def check(
    model: Model,
    against: Against = None,
    engines: Engines = None,
    choices: Choices = None,
    tolerance: Annotated[
        float | None, typer.Option(help="how far answers may be off, as a share of the largest value")
    ] = None,
    draws: Annotated[int, typer.Option(help="how many inputs are drawn beside the example", min=0)] = 3,
    edges: Annotated[bool, typer.Option(help="compare at zeros, an infinity, NaN and the like, too")] = True,
    reproduction: Annotated[
        Path, typer.Option(help="where the first node that differs is written, with its inputs")
    ] = Path("reproduction.pt2"),
    full: Full = False,
    json: AsJson = False,
) -> None:
    """Compare something with the model it claims to compute; name the first node that differs.

    The exit code is 1 if an answer differs by more than rounding.
    """
    from intarsia.cli.model import resolve
    from intarsia.report.check import check as check_candidate

    specimen = resolve(model, full=full)
    options = compile_options(engines, None, choices)
    candidate = _candidate(model, specimen, against, options)
    report = check_candidate(
        specimen.model,
        specimen.args,
        candidate,
        specimen.kwargs,
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
    choices: Choices = None,
    full: Full = False,
    json: AsJson = False,
) -> None:
    """Compile a model, or take an archive, and show the error of each segment.

    The exit code is 1 if a segment by itself differs by more than rounding.
    """
    from intarsia.cli.model import compiled_file, resolve
    from intarsia.report.diff import diff as diff_segments
    from intarsia.runtime import Compiled

    specimen = resolve(model, full=full)
    options = compile_options(engines, None, choices)
    compiled = compiled_file(model) or _compiled(specimen, options)
    if not isinstance(compiled, Compiled):
        raise InputError(f"{model} is compiled in parts; give one of them")
    report = diff_segments(compiled, specimen.args, specimen.kwargs)
    print_json(report.as_dict()) if json else typer.echo(str(report))
    if not report.equal:
        raise typer.Exit(DIFFERS)


def _candidate(name: str, specimen: Specimen, against: str | None, options: dict[str, Any]) -> Any:
    from intarsia.cli.model import call_factory, compiled_file

    if against is None:
        return compiled_file(name) or _compiled(specimen, options)
    place, colon, function = against.rpartition(":")
    if not colon:
        return against
    made = call_factory(place, function, specimen.module)
    if not callable(made):
        raise InputError(f"{against} must return a callable, not a {type(made).__name__}")
    return made


def _compiled(specimen: Specimen, options: dict[str, Any]) -> Compiled | Any:
    import intarsia

    return intarsia.compile(specimen.model, specimen.args, specimen.kwargs, **options)
