"""`intarsia split` and `intarsia pipeline`: cut a model, draw a schedule, train over several processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Annotated, Any, Literal

import typer

from intarsia.cli.arguments import AsJson, Full, Model, check_writable, print_json
from intarsia.drawing import check_picture
from intarsia.errors import InputError, IntarsiaError, PartitionError, count_text

app: typer.Typer = typer.Typer(help="Cut models into stages and run them as pipelines.", no_args_is_help=True)

ScheduleName = Annotated[str, typer.Option(help="Name of a schedule; see `intarsia pipeline schedules`.")]
Imports = Annotated[
    list[str] | None, typer.Option("--import", help="Python file or module that defines schedules.")
]
_LAUNCH = "--standalone"  # the first argument of the process that starts one process per rank

Microbatches = Annotated[int, typer.Option(help="Number of micro-batches.")]


def split(
    model: Model,
    stages: Annotated[int, typer.Option(help="Number of stages.", min=1)] = 2,
    by: Annotated[str, typer.Option(help="Balance time or memory.")] = "time",
    full: Full = False,
    json: AsJson = False,
) -> None:
    """Cut a model into balanced pipeline stages. Print the cuts and the cost of each stage."""
    from intarsia.cli.model import resolve
    from intarsia.pipeline import split as split_model

    specimen = resolve(model, full=full)
    if by not in ("time", "memory"):
        raise InputError(f"--by {by} is neither time nor memory")
    balanced: Literal["time", "memory"] = "time" if by == "time" else "memory"
    parts = split_model(specimen.module, specimen.args, specimen.kwargs, stages=stages, by=balanced)
    report = parts.report
    if not json:
        typer.echo(str(report))
        return
    costs = [
        {"forward_s": c.forward, "backward_s": c.backward, "weights": c.weights, "kept": c.saved}
        for c in report.costs
    ]
    content = {"way": report.way, "reason": report.reason, "by": report.by, "balance": report.balance}
    print_json({**content, "stages": costs, "bytes_across": list(report.crossing)})


@app.command()
def draw(
    schedule: ScheduleName = "1F1B",
    ranks: Annotated[int, typer.Option(help="Number of devices.")] = 4,
    microbatches: Microbatches = 8,
    picture: Annotated[Path | None, typer.Option(help="Write an .svg, .png or .pdf file instead.")] = None,
    imports: Imports = None,
    json: AsJson = False,
) -> None:
    """Draw a schedule as text or as a picture."""
    from intarsia.pipeline.plan.simulate import ascii_gantt, save_gantt
    from intarsia.pipeline.schedules import schedule as schedule_of

    check_writable(picture)
    _check_positive(ranks=ranks, microbatches=microbatches)
    _import(imports)
    plan = schedule_of(schedule, ranks, microbatches)
    if picture is not None:
        save_gantt(plan, picture)
    if json:
        print_json({"schedule": plan.name, "ranks": [list(map(str, slots)) for slots in plan.ranks]})
    else:
        typer.echo(ascii_gantt(plan) if picture is None else f"wrote {picture}")


@app.command()
def schedules(imports: Imports = None, json: AsJson = False) -> None:
    """List the schedules and what each needs."""
    from intarsia.pipeline.schedules import SCHEDULES, TORCH_ONLY

    _import(imports)
    definitions = [*SCHEDULES.values(), *TORCH_ONLY.values()]
    if json:
        content = {
            definition.name: {
                "stages_per_rank": definition.per_rank,
                "splits_backward": definition.splits_backward,
                "is_simulated": definition.order is not None,
            }
            for definition in definitions
        }
        print_json(content)
        return
    for definition in definitions:
        stages = f"{count_text(definition.per_rank, 'stage')} per rank"
        splits = ", weight gradients in a pass of their own" if definition.splits_backward else ""
        runs_only = "" if definition.order is not None else ", only run by torch, not simulated"
        typer.echo(f"{definition.name:<16} {stages}{splits}{runs_only}")


@app.command()
def run(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:FUNCTION, MODULE:FUNCTION, or a model type of Hugging Face: gpt2:n_layer=4."
        ),
    ] = None,
    schedule: ScheduleName = "1F1B",
    ranks: Annotated[int, typer.Option(help="Number of processes to start; unused under torchrun.")] = 2,
    microbatches: Microbatches = 8,
    steps: Annotated[
        int, typer.Option(help="Number of training steps, including those before a checkpoint.")
    ] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a rank.")] = 60.0,
    text: Annotated[
        Path | None, typer.Option(help="Train a language model on the bytes of this file.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of text windows in a step.")] = 16,
    length: Annotated[int, typer.Option(help="Bytes in a window.")] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    recompute: Annotated[bool, typer.Option(help="Recompute activations in the backward pass.")] = False,
    save: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None,
    every: Annotated[int, typer.Option(help="Number of steps between checkpoints.")] = 50,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint in --save.")] = False,
    curve: Annotated[
        Path | None, typer.Option(help="Write the loss curve to an .svg, .png or .pdf file.")
    ] = None,
    imports: Imports = None,
    json: Annotated[bool, typer.Option("--json", help="Print the losses as JSON.")] = False,
) -> None:
    """Train a model over several processes.

    Without MODEL, train a small language model and compare its gradients with those of the plain model.
    """
    from intarsia.pipeline.distributed.placement import schedule_class
    from intarsia.pipeline.schedules import find_schedule

    _import(imports)
    definition = find_schedule(schedule)
    per_rank = 1 if definition is None else definition.per_rank
    if "RANK" not in os.environ:
        _check_positive(ranks=ranks, microbatches=microbatches, steps=steps, timeout=timeout)
        _check_positive(batch=batch, length=length, rate=rate, every=every)
        schedule_class(schedule, ranks, microbatches)  # raises here, not on every rank
        if resume and save is None:
            raise PartitionError("--resume needs --save, the folder of the checkpoints")
        if curve is not None:
            check_writable(curve)
            check_picture(curve)
        if model is None and text is not None:
            raise PartitionError("--text needs a model to train")
        if model is not None:
            from intarsia.cli.pipeline_train import find_factory

            find_factory(model)  # raises here for an unknown name, not on every rank
        raise typer.Exit(_under_torchrun(ranks, _words(context.params)))
    from intarsia.cli.pipeline_train import Training, demo_job, job_of, train_rank

    job = demo_job(microbatches) if model is None else job_of(model, text, batch, length)
    options = Training(
        schedule, microbatches, per_rank, steps, rate, recompute, save, every, resume, curve, timeout
    )
    losses = train_rank(job, options, partial(typer.echo, err=json))
    if json and losses is not None:
        print_json({"losses": losses})


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if value <= 0:
            raise PartitionError(f"--{name}={value} must be more than 0")


def _import(names: Sequence[str] | None) -> None:
    """Import files and modules for the schedules that they define."""
    for name in names or ():
        if name.endswith(".py"):
            run_path(name)
        else:
            import_module(name)


def _words(options: Mapping[str, Any]) -> list[str]:
    """The words of a command line with these options."""
    single = {name: value for name, value in options.items() if name not in ("model", "imports")}
    words = [f"--{name}={value}" for name, value in single.items() if value is not None]
    words += [f"--import={name}" for name in options["imports"] or ()]
    flags = [word.removesuffix("=True") for word in words if not word.endswith("=False")]
    return flags if options["model"] is None else [options["model"], *flags]


def _under_torchrun(ranks: int, options: list[str]) -> int:
    """Start this command again, once per rank; returns the exit code."""
    torchrun = [sys.executable, "-m", "intarsia.cli.pipeline", _LAUNCH, f"--nproc_per_node={ranks}"]
    command = [*torchrun, "-m", "intarsia.cli.pipeline", "run", *options]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run(command, env=environment, check=False).returncode


def _launch() -> None:
    """Run torchrun. Print the error of the first failed rank, or its exit status, as one sentence."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.disable(logging.CRITICAL)  # only torchrun logs in this process
    try:
        main()
    except ChildFailedError as error:
        messages = [text for _, failure in sorted(error.failures.items()) if (text := _recorded(failure))]
        rank, first = error.get_first_failure()
        status = f"rank {rank} ended with exit status {first.exitcode}"
        print(messages[0] if messages else status, file=sys.stderr)
        raise SystemExit(2 if messages else 3) from None


def _recorded(failure: Any) -> str:
    """The error that a rank recorded, without the name of the exception; empty if it recorded none."""
    data = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message", "") if isinstance(message, dict) else ""
    return str(text).partition(": ")[2]


def _run_rank() -> None:
    """The command on one rank. The launcher gets an IntarsiaError and prints it once for all ranks."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        app()
    except IntarsiaError as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(error)
        else:
            typer.secho(str(error), fg="red", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    _launch() if sys.argv[1:2] == [_LAUNCH] else _run_rank()
