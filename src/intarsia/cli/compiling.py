"""`intarsia explain | compile | export | bench | demo | check | diff`: commands about a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from intarsia.cli.arguments import (
    AsJson,
    Budget,
    Choices,
    Dtype,
    Engines,
    Full,
    Model,
    Ranges,
    check_writable,
    compile_options,
    complete_architecture,
    print_json,
)
from intarsia.errors import InputError

if TYPE_CHECKING:
    from intarsia.cli.zoo import Specimen


def explain(
    model: Model,
    engines: Engines = None,
    ranges: Ranges = None,
    choices: Choices = None,
    full: Full = False,
    dtype: Dtype = None,
    html: Annotated[Path | None, typer.Option(help="Write the report to this HTML file.")] = None,
    json: AsJson = False,
) -> None:
    """Show which engine would run each part of a model, and why. Nothing is built.

    For a compiled file, show what runs where.
    """
    from rich.console import Console

    from intarsia.cli.model import compiled_file, resolve
    from intarsia.report import explain as explain_model

    check_writable(html)
    compiled = compiled_file(model)
    if compiled is not None:
        typer.echo(compiled.plan.to_json() if json else str(compiled.plan))
        return
    options = compile_options(engines, None, choices)
    specimen = resolve(model, full=full, ranges=ranges, dtype=dtype)
    call = specimen.model, specimen.args, specimen.kwargs
    report = explain_model(*call, dynamic_shapes=specimen.dynamic_shapes, **options)
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
        typer.echo(f"wrote {html}")
    elif json:
        typer.echo(report.to_json())
    else:
        console = Console()  # tables need a wide terminal; otherwise, lines are printed
        console.print(report) if console.is_terminal and console.width >= 80 else typer.echo(str(report))


def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    engines: Engines = None,
    budget: Budget = None,
    ranges: Ranges = None,
    choices: Choices = None,
    full: Full = False,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Compile a model and save it for `intarsia run`, `intarsia serve` and intarsia.load."""
    import json as json_module

    import intarsia
    from intarsia.cli.model import compiled_file, resolve

    if compiled_file(model) is not None:
        raise InputError(f"{model} is compiled already; use `intarsia run` or `intarsia serve`")
    check_writable(output)
    options = compile_options(engines, budget, choices)
    specimen = resolve(model, full=full, ranges=ranges, dtype=dtype)
    began = time.perf_counter()
    fast = specimen.compile(**options)
    seconds = time.perf_counter() - began
    intarsia.save(fast, output)
    size = output.stat().st_size
    plan = getattr(fast, "plan", None)  # a model compiled in parts has one for each part
    if json:
        content = {
            "file": str(output),
            "bytes": size,
            "seconds": seconds,
            "plan": None if plan is None else json_module.loads(plan.to_json()),
            "notes": list(fast.notes),
        }
        print_json(content)
        return
    typer.echo(str(fast if plan is None else plan))
    for note in fast.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {output}: {size / 2**20:.1f} MiB, compiled in {seconds:.1f} s")


def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option("--to", help="Format: onnx, openvino, pt2, or the name of an engine that writes files."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write, or new folder if the plan has several segments.",
        ),
    ] = None,
    ranges: Ranges = None,
    choices: Choices = None,
    full: Full = False,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Export a model as a file that the engine's own runtime loads without Intarsia."""
    import intarsia
    from intarsia.cli.model import compiled_file, resolve

    engine, suffix = _runtime(to)
    options = compile_options(engine, None, choices)
    compiled = compiled_file(model)
    if compiled is None or to == "pt2":
        fast = resolve(model, full=full, ranges=ranges, dtype=dtype).compile(**options)
    else:
        fast = compiled
    stem = Path(model.rpartition(":")[2]).stem
    exported = intarsia.export(fast, output or Path(f"{stem}{suffix}"))
    if json:
        print_json(
            {"path": str(exported.path), "is_folder": exported.is_folder, "settings": exported.settings}
        )
    else:
        typer.echo(str(exported))


def _runtime(to: str) -> tuple[str, str]:
    """The engine whose runtime loads the exported file, and the suffix of its files."""
    from intarsia.engines import NetworkEngine, known_engines
    from intarsia.graph.segment import PYTORCH

    formats = {"pt2": (PYTORCH, ".pt2")}
    for name, kind in known_engines().items():
        if issubclass(kind, NetworkEngine) and kind.file_suffix and kind.based_on is None:
            # By the engine's name, or by the suffix: `openvino` writes `.xml`, and `onnx` names a format.
            formats.setdefault(name, (name, kind.file_suffix))
            formats.setdefault(kind.file_suffix[1:], (name, kind.file_suffix))
    if to not in formats:
        raise InputError(f"--to {to} is none of {', '.join(formats)}")
    return formats[to]


def bench(
    model: Model,
    engines: Engines = None,
    choices: Choices = None,
    full: Full = True,
    dtype: Dtype = None,
    torch_compile: Annotated[
        bool, typer.Option(help="Time torch.compile too, which may compile for minutes.")
    ] = True,
    seconds: Annotated[float, typer.Option(help="Seconds to spend on timing.", min=0.1)] = 20.0,
    padded: Annotated[
        int | None, typer.Option(help="Rows of token ids, with an attention_mask that hides padding.", min=1)
    ] = None,
    varying: Annotated[
        bool, typer.Option(help="Padded rows whose batch and length vary: time three lengths in turn.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Times the example is repeated in a batch.", min=1)] = 1,
    objective: Annotated[
        str, typer.Option(help="latency, or throughput: several threads call at once.")
    ] = "latency",
    exported: Annotated[
        bool, typer.Option(help="Time what torch.onnx exports, in each engine's own runtime.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Time a model on each engine, on the measured plan, in eager PyTorch and in torch.compile."""
    from intarsia.cli.bench import compare, print_comparison
    from intarsia.cli.model import resolve

    options = compile_options(engines, None, choices)
    if varying and padded is None:
        raise InputError("--varying needs --padded ROWS")
    if objective not in ("latency", "throughput"):
        raise InputError(f"--objective {objective} is none of latency, throughput")
    specimen = resolve(model, full=full, dtype=dtype).repeated(batch)
    if padded is not None:
        specimen = specimen.padded(padded, varying=varying)
    comparison = compare(
        specimen,
        options,
        torch_compile=torch_compile,
        seconds=seconds,
        objective=objective,  # type: ignore[arg-type]
        exported=exported,
    )
    if json:
        print_json(comparison.as_dict())
    else:
        print_comparison(comparison)


def demo(
    architecture: Annotated[
        str, typer.Argument(help="Architecture; see --list.", autocompletion=complete_architecture)
    ] = "bert",
    full: Full = True,
    list_: Annotated[bool, typer.Option("--list", help="List the architectures.")] = False,
    json: AsJson = False,
) -> None:
    """Compile a well-known architecture on each engine. Print the plan, errors and latencies."""
    from intarsia.cli import zoo
    from intarsia.cli.bench import compare, print_comparison

    if list_:
        print_json(zoo.names()) if json else typer.echo("\n".join(zoo.names()))
        return
    comparison = compare(zoo.specimen(architecture, full=full))
    if json:
        print_json(comparison.as_dict())
    else:
        print_comparison(comparison, plan=True)


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
