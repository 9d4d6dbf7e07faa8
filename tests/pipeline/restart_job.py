"""A training job for torchrun that a rank leaves by SIGKILL once: `restart_job.py FOLDER STEPS VICTIM`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from intarsia.pipeline.distributed.saved import latest_checkpoint
from intarsia.pipeline.distributed.start import start_process_group
from intarsia.pipeline.split import split


def make():
    """The model, its optimizer's options, and the batch of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    return model, {"lr": 1e-2}, lambda step: torch.rand(8, 6, generator=torch.Generator().manual_seed(step))


def run(folder: Path, steps: int, victim: int) -> None:
    torch.set_num_threads(1)
    start_process_group("gloo")
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model, options, batch = make()
    parts = split(model, (batch(0),), stages=dist.get_world_size(), by="memory")
    pipe = parts.distributed("1F1B", 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), **options)
    begin, saved = 0, latest_checkpoint(folder / "saved")
    if saved is not None:
        pipe.load(saved, optimizer)
        begin = int(saved.name)
    for step in range(begin, steps):
        if first_life and step == steps // 2 and dist.get_rank() == victim:
            pipe[0].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pipe.zero_grad()
        x = batch(step)
        result = pipe.step(x, target=x)
        optimizer.step()
        if pipe.is_last:
            with (folder / "losses").open("a") as file:
                file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step} {result.loss.item()!r}\n")
        if step % 2:  # the last step before the fault is not saved, and is done again
            pipe.save(folder / "saved" / str(step + 1), optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
