"""`intarsia explain | compile | export | bench | demo`: commands that make something of a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from intarsia.cli.arguments import AsJson, Budget, Choices, Engines, Full, Model, compile_options, print_json
from intarsia.errors import InputError


def explain(
    model: Model,
    engines: Engines = None,
    choices: Choices = None,
    full: Full = False,
    html: Annotated[Path | None, typer.Option(help="write the report there instead, as one page")] = None,
    json: AsJson = False,
) -> None:
    """Say what would run where, and why. No engine is built; of an archive, what does run where."""
    from rich.console import Console

    from intarsia.cli.model import compiled_file, resolve
    from intarsia.report import explain as explain_model

    compiled = compiled_file(model)
    if compiled is not None:
        typer.echo(compiled.plan.to_json() if json else str(compiled.plan))
        return
    specimen = resolve(model, full=full)
    options = compile_options(engines, None, choices)
    report = explain_model(specimen.model, specimen.args, specimen.kwargs, **options)
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
        typer.echo(f"wrote {html}")
    elif json:
        typer.echo(report.to_json())
    else:
        Console().print(report)


def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="the file to write")],
    engines: Engines = None,
    budget: Budget = None,
    choices: Choices = None,
    full: Full = False,
    json: AsJson = False,
) -> None:
    """Compile a model and write it to a file that `intarsia run`, `intarsia serve` and intarsia.load read."""
    import json as json_module

    import intarsia
    from intarsia.cli.model import compiled_file, resolve

    if compiled_file(model) is not None:
        raise InputError(f"{model} is compiled already; `intarsia run` and `intarsia serve` take it as it is")
    if not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} to write {output.name} to")
    options = compile_options(engines, budget, choices)
    specimen = resolve(model, full=full)
    began = time.perf_counter()
    fast = intarsia.compile(specimen.model, specimen.args, specimen.kwargs, **options)
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
    to: Annotated[str, typer.Option("--to", help="onnx, openvino or pt2, or an engine that writes files")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="the file to write, or a new folder for a plan of several segments",
        ),
    ] = None,
    choices: Choices = None,
    full: Full = False,
    json: AsJson = False,
) -> None:
    """Write a model for an engine's own runtime, which loads it without this package."""
    import intarsia
    from intarsia.cli.model import compiled_file, resolve

    engine, suffix = _runtime(to)
    options = compile_options(engine, None, choices)
    compiled = compiled_file(model)
    if compiled is None or to == "pt2":
        specimen = resolve(model, full=full)
        fast = intarsia.compile(specimen.model, specimen.args, specimen.kwargs, **options)
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
    """The engine whose runtime loads what is exported, and the suffix of its files."""
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
    torch_compile: Annotated[bool, typer.Option(help="torch.compile too, which may take minutes")] = True,
    seconds: Annotated[float, typer.Option(help="how long the plans are timed", min=0.1)] = 20.0,
    json: AsJson = False,
) -> None:
    """Time a model compiled on every engine beside eager PyTorch and torch.compile."""
    from intarsia.cli.bench import compare, print_comparison
    from intarsia.cli.model import resolve

    options = compile_options(engines, None, choices)
    comparison = compare(resolve(model, full=full), options, torch_compile=torch_compile, seconds=seconds)
    if json:
        print_json(comparison.as_dict())
    else:
        print_comparison(comparison)


def demo(
    architecture: Annotated[str, typer.Argument(help="an architecture of `--list`")] = "bert",
    full: Full = True,
    list_: Annotated[bool, typer.Option("--list", help="name the architectures and stop")] = False,
    json: AsJson = False,
) -> None:
    """Compile a real architecture on every engine; print plan, correctness and latency side by side."""
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
