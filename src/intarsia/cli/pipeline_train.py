"""One rank of a training run of `intarsia pipeline run`: progress, loss curve, checkpoints, resuming."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.cli.pipeline_model import Batch, Job
from intarsia.drawing.drawing import new_figure, save_figure
from intarsia.errors import InputError, PipelineError
from intarsia.pipeline.distributed.pipeline import DistributedPipeline
from intarsia.pipeline.distributed.start import start_process_group
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import SCHEDULES, schedule
from intarsia.pipeline.split import split

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """The options of a training run."""

    schedule: str
    microbatches: int
    per_rank: int
    steps: int
    rate: float
    checkpoint: bool
    save: Path | None
    every: int
    resume: bool
    curve: Path | None
    timeout: float


def train_rank(job: Job, options: Training, echo: Echo) -> list[float] | None:
    """Train the job's model with the other ranks. The rank of the last stage reports and returns losses."""
    device = _start(options.timeout)
    first = job.data(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = copy.deepcopy(job.model) if job.compare else None
    part = [_microbatch(values, options.microbatches) for values in (first.args, dict(first.kwargs))]
    parts = split(job.model, *part, stages=world * options.per_rank, agree=True)
    if rank == 0:
        echo(str(parts.report))
    weighed = {} if job.loss_weight is None else {"loss_weight": job.loss_weight, "check_loss": False}
    pipe = parts.distributed(
        options.schedule, options.microbatches, loss_fn=job.loss, checkpoint=options.checkpoint, **weighed
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.rate)
    losses = _resumed(pipe, optimizer, options) if options.resume or _restarted(options) else []
    if losses and pipe.is_last:
        echo(f"continues after step {len(losses)}")
    begin, before = time.perf_counter(), len(losses)
    for step in range(before, options.steps):
        # The user's factory may draw its data; dropout draws by the pipeline's own seed and steps.
        torch.manual_seed(step)
        batch = job.data(step)
        args, kwargs, target = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(device), (batch.args, dict(batch.kwargs), batch.target)
        )
        optimizer.zero_grad()
        result = pipe.step(*args, target=target, **kwargs)
        if plain is not None and step == before:
            worst = _largest_difference(pipe, plain, job, batch)
            agreement = f"gradients equal the plain model's (difference {worst:.1e})"
            echo(f"rank {rank}: stages {sorted(pipe.parts)}, {agreement}")
        optimizer.step()
        losses.append(float("nan") if result.loss is None else float(result.loss))
        if pipe.is_last:
            each = (time.perf_counter() - begin) / (step + 1 - before)
            if step + 1 in (before + 1, options.steps) or (step + 1) % max(1, options.steps // 20) == 0:
                progress = f"step {step + 1:>5}/{options.steps}"
                echo(f"{progress}  loss {losses[-1]:.4f}  {each * 1e3:.0f} ms per step")
        if options.save is not None and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            _save(pipe, optimizer, options.save, losses)
    if pipe.is_last:
        if options.schedule in SCHEDULES:
            plan = schedule(options.schedule, world, options.microbatches, options.per_rank)
            predicted = simulate(plan, parts.report.costs)
            echo(f"predicted {predicted.step_time * 1e3:.0f} ms per step, bubble {predicted.bubble:.0%}")
        echo(text_curve(losses))
        if options.curve is not None:
            save_curve(losses, options.curve)
            echo(f"wrote {options.curve}")
    dist.barrier()
    dist.destroy_process_group()
    return losses if pipe.is_last else None


def _largest_difference(pipe: DistributedPipeline, plain: nn.Module, job: Job, batch: Batch) -> float:
    """The largest difference between this rank's gradients and those of the model on one device."""
    torch.autograd.backward(job.loss(plain(*batch.args, **batch.kwargs), batch.target))
    expected = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    worst = 0.0
    for module in pipe:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gradient, reference = parameter.grad, expected[name]
            assert gradient is not None and reference is not None
            worst = max(worst, float((gradient.cpu() - reference).abs().max()))
    if worst > 1e-4:
        raise PipelineError(f"a gradient differs from the plain model's by {worst:.2e}")
    return worst


def _start(timeout: float) -> torch.device:
    """Start the process group. Returns this rank's device: its GPU if there is one per rank, or the CPU."""
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start_process_group("nccl" if on_gpu else "gloo", timedelta(seconds=timeout))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _microbatch(values: Any, microbatches: int) -> Any:
    """The first micro-batch of a batch; the whole batch if it has one sample, which export would fix."""
    sizes = {t.shape[0] for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.ndim}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.shape[0] // microbatches
        return tensor[:size] if tensor.ndim and size >= 2 and len(sizes) == 1 else tensor

    return pytree.tree_map_only(torch.Tensor, cut, values)


def _save(
    pipe: DistributedPipeline, optimizer: torch.optim.Optimizer, folder: Path, losses: list[float]
) -> None:
    """Write a checkpoint beside the last one, make it the latest, and delete the last one."""
    name = f"step-{len(losses)}"
    pipe.save(folder / name, optimizer)
    if pipe.is_last:
        before = _latest(folder)
        new = folder / "latest.json.new"
        new.write_text(json.dumps({"checkpoint": name, "losses": losses, "run": _run_id()}), encoding="utf-8")
        new.replace(folder / "latest.json")
        if before is not None and before["checkpoint"] != name:
            shutil.rmtree(folder / before["checkpoint"], ignore_errors=True)
    dist.barrier()


def _resumed(pipe: DistributedPipeline, optimizer: torch.optim.Optimizer, options: Training) -> list[float]:
    """Load the last checkpoint, and return the losses until it."""
    assert options.save is not None
    latest = _latest(options.save)
    if latest is None:
        raise InputError(f"--resume: there is no checkpoint in {options.save}")
    pipe.load(options.save / latest["checkpoint"], optimizer)
    return [float(x) for x in latest["losses"]]


def _restarted(options: Training) -> bool:
    """Whether torchrun has restarted this run, and there is a checkpoint of it."""
    if options.save is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    latest = _latest(options.save)
    # A checkpoint of another run is used only with --resume.
    return latest is not None and _run_id() is not None and latest.get("run") == _run_id()


def _run_id() -> str | None:
    """torchrun's name of this run, the same after restarts; None if there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def _latest(folder: Path) -> dict[str, Any] | None:
    path = folder / "latest.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def text_curve(losses: Sequence[float], width: int = 60, height: int = 10) -> str:
    """The losses as a chart of characters; several steps share a column if there are many.

    >>> print(text_curve([3.0, 2.0, 1.0], width=3, height=3))
    3.000 |*
          | *
    1.000 |  *
    """
    points = _columns([x for x in losses if math.isfinite(x)], width)
    if not points:
        return "no losses"
    low, high = min(points), max(points)
    scale = (height - 1) / (high - low) if high > low else 0.0
    rows = [round((high - p) * scale) for p in points]
    ends = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    margin = max(map(len, ends.values()))
    lines = []
    for y in range(height):
        marks = "".join("*" if r == y else " " for r in rows).rstrip()
        lines.append(f"{ends.get(y, ''):>{margin}} |{marks}")
    return "\n".join(lines)


def save_curve(losses: Sequence[float], path: Path) -> None:
    """Write a chart of the losses as a picture."""
    figure = new_figure(7, 3.5)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#1565c0")
    axes.set(title=f"loss over {len(losses)} steps", xlabel="step", ylabel="loss")
    axes.grid(color="#dddddd")
    save_figure(figure, path)


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    bounds = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
