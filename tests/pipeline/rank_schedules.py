"""Cases of ranks: generators of schedules, run by torch's runtime in their own order."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from runpy import run_path

import torch
from torch import nn
from torch.nn import functional as F

from intarsia.pipeline import SCHEDULES, split


def own_order() -> None:
    run_path(str(Path(__file__).resolve().parents[2] / "examples" / "own_schedule.py"))
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), target).backward()
    want = {n: p.grad for n, p in plain.named_parameters()}
    for name, definition in list(SCHEDULES.items()):
        SCHEDULES[name] = dataclasses.replace(definition, torch="")  # the generator, whatever torch has
        stages = split(model, (x,), stages=2 * definition.per_rank, by="memory")
        pipe = stages.distributed(name, 4, loss_fn=F.mse_loss)
        assert pipe.schedule_class.__name__ == name
        for step in (1, 2):
            pipe.step(x, target=target)
            for key, parameter in dict(pipe.named_parameters()).items():
                torch.testing.assert_close(parameter.grad, step * want[key], rtol=1e-4, atol=1e-6)
        out = pipe.infer(x)
        if pipe.is_last:
            torch.testing.assert_close(out, plain(x))
        model.zero_grad()
        print(f"{name} ok", flush=True)


def deferred() -> None:
    """Running statistics of batch norm are those of the whole batch, also in a step after another.

    Under autocast, the run that finds the dtypes at the borders is no micro-batch.
    """
    for autocast in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        whole, x = copy.deepcopy(model), torch.randn(8, 8) * 2 + 1
        stages = split(model, (x,), stages=2, cuts=["3"])
        pipe = stages.distributed("1F1B", 4, loss_fn=F.mse_loss, deferred_batch_norm=True, check_loss=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for _ in range(2):
                whole(x)
                pipe.step(x, target=x)
        if pipe.is_first:
            for name, buffer in whole[1].named_buffers():
                torch.testing.assert_close(pipe.state_dict()[f"1.{name}"], buffer)
    print("deferred ok", flush=True)
