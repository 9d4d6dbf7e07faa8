"""`intarsia pipeline`: draw a schedule, run one over several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from intarsia.errors import PartitionError

app = typer.Typer(help="Cut models into stages and run them as pipelines.", no_args_is_help=True)

ScheduleName = Annotated[str, typer.Option(help="GPipe, 1F1B, Interleaved1F1B, ZeroBubble, ...")]
Microbatches = Annotated[int, typer.Option(help="Micro-batches.")]


@app.command()
def draw(
    schedule: ScheduleName = "1F1B",
    ranks: Annotated[int, typer.Option(help="Devices.")] = 4,
    microbatches: Microbatches = 8,
    picture: Annotated[Path | None, typer.Option(help="Write an .svg or .html file instead.")] = None,
) -> None:
    """Draw a schedule, as text or as a picture."""
    from intarsia.pipeline.schedule.draw import ascii_gantt, html_gantt, svg_gantt
    from intarsia.pipeline.schedule.schedules import schedule as make

    _check_positive(ranks=ranks, microbatches=microbatches)
    plan = make(schedule, ranks, microbatches)
    if picture is None:
        typer.echo(ascii_gantt(plan))
        return
    picture.write_text(html_gantt(plan) if picture.suffix == ".html" else svg_gantt(plan), encoding="utf-8")
    typer.echo(f"wrote {picture}")


@app.command()
def run(
    schedule: ScheduleName = "1F1B",
    ranks: Annotated[int, typer.Option(help="Processes, when not under torchrun already.")] = 2,
    microbatches: Microbatches = 8,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds until a silent rank is given up.")] = 60.0,
) -> None:
    """Train a small language model over several processes and check it against the plain model."""
    if "RANK" not in os.environ:
        _check_positive(ranks=ranks, microbatches=microbatches, steps=steps, timeout=timeout)
        _check_schedule(schedule, ranks, microbatches)
        options = [f"--schedule={schedule}", f"--microbatches={microbatches}"]
        raise typer.Exit(_under_torchrun(ranks, [*options, f"--steps={steps}", f"--timeout={timeout}"]))
    from intarsia.cli.pipeline_demo import run_rank

    run_rank(schedule, microbatches, steps, 2 if schedule in _TWO else 1, timeout, typer.echo)


# These give each rank two stages.
_TWO = {"Interleaved1F1B", "LoopedBFS", "ZBV", "DualPipeV"}


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if value <= 0:
            raise PartitionError(f"--{name}={value} must be more than 0")


def _check_schedule(schedule: str, ranks: int, microbatches: int) -> None:
    """Refuse, before a process is started, what every rank would refuse."""
    from intarsia.pipeline.distributed.placement import schedule_class
    from intarsia.pipeline.schedule.schedules import refusal

    schedule_class(schedule)
    reason = refusal(schedule, ranks, microbatches)
    if reason is not None:
        raise PartitionError(reason)


def _under_torchrun(ranks: int, options: list[str]) -> int:
    """Start this command again, once a rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*torchrun, "-m", "intarsia.cli.pipeline", "run", *options]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    app()
