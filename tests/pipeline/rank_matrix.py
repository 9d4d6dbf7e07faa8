"""Cases of ranks: each architecture, schedule, checkpointing and autocast against the plain model."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from hf_zoo import error, loss_of, make, plain_step, weight_of

from intarsia.pipeline import split

SCHEDULES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "ZeroBubble": 2}
CHUNKS = 4


def plain_run(name: str, chunks: int, autocast: bool, steps: int):
    """The first step's logits, loss and gradients of the plain model, and its losses over the steps."""
    model, call, target = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, first = [], None
    for _ in range(steps):
        optimizer.zero_grad()
        loss, logits = plain_step(model, call, target, chunks, autocast)
        losses.append(float(loss))
        if first is None:
            first = logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return first[0], first[1], losses, model.state_dict()


def run_case(stages, start, name, schedule, checkpoint, autocast, steps, want) -> dict[str, float]:
    """The largest errors of one way to run an architecture."""
    _, call, target = make(name)
    logits, grads, losses, weights = want
    pipe = stages.distributed(
        schedule, CHUNKS, loss_fn=loss_of, loss_weight=weight_of, checkpoint=checkpoint, check_loss=False
    )
    pipe.load_state_dict({k: v.clone() for k, v in start.items()})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    # Some gradients are 0 but for rounding (of the biases of keys): they are held against the others.
    least = max(float(g.abs().max()) for g in grads.values()) / 1000
    moved = max(float((w - start[k]).abs().max()) for k, w in weights.items() if w.is_floating_point())
    found = {"output": 0.0, "gradient": 0.0, "loss": 0.0, "weight": 0.0}
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = pipe.step(target=target, **call)
        if pipe.is_last:
            found["loss"] = max(found["loss"], abs(float(result.loss) - losses[step]) / abs(losses[step]))
        if step == 0:
            if pipe.is_last:
                found["output"] = error(result.output.logits, logits)
            for key, parameter in pipe.named_parameters():
                if parameter.grad is not None and key in grads:
                    off = error(parameter.grad, grads[key], least)
                    found["gradient"] = max(found["gradient"], off)
                else:
                    assert key not in grads or not grads[key].any(), key
        optimizer.step()
    for key, value in pipe.state_dict().items():
        if value.is_floating_point():
            found["weight"] = max(found["weight"], float((value - weights[key]).abs().max()) / moved)
    return found


def sample(*names: str) -> None:
    """Two steps of two schedules."""
    rows(names, True, 2)


def every_way(steps: str, *names: str) -> None:
    rows(names, False, int(steps))


def rows(names: Sequence[str], sample: bool, steps: int) -> None:
    """Print a row of JSON for each way to run each architecture."""
    for name in names:
        begin = time.perf_counter()
        model, call, _ = make(name)
        start = copy.deepcopy(model.state_dict())
        cut = {n: split(model, (), call, stages=n, by="memory") for n in ((2,) if sample else (2, 4))}
        for autocast in (False, True):
            want = plain_run(name, CHUNKS, autocast, steps)
            for (schedule, stages), checkpoint in itertools.product(SCHEDULES.items(), (False, True)):
                if stages not in cut or (sample and (checkpoint != autocast or schedule == "GPipe")):
                    continue
                found = run_case(cut[stages], start, name, schedule, checkpoint, autocast, steps, want)
                row = {"name": name, "schedule": schedule, "checkpoint": checkpoint, "autocast": autocast}
                print(json.dumps(row | {"rank": dist.get_rank()} | found), flush=True)
        if dist.get_rank() == 0:
            print(f"{name} took {time.perf_counter() - begin:.0f} s", flush=True)
