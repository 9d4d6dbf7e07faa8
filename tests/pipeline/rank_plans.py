"""A case of ranks: each plan that is returned runs, with the plain gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from intarsia.errors import PartitionError
from intarsia.pipeline import SCHEDULES, Cluster, plan_pipeline

FREE = {"bandwidth": 1e15, "latency": 0.0}  # a link that costs nothing: all devices are worth using


def tiny() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(64, 64), torch.randn(64, 64)


def clusters() -> None:
    """Plans for a cluster of as many devices as there are ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model, x, target = tiny()
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x), target).backward()
    want = {n: p.grad for n, p in plain.named_parameters()}
    grid = [(name, 4, 1, 10**9) for name in SCHEDULES]
    grid.append(("GPipe", 8, 1, 250_000))  # where only recomputing fits
    grid.append(("1F1B", 2, world, 10**9))
    ran = set()
    for name, count, replicas, memory in grid:
        cluster = Cluster.of({"devices": world, "memory": memory, "link": FREE})
        ways = {"schedules": [name], "microbatches": [count], "replicas": [replicas]}
        plan = plan_pipeline(model, (x,), cluster=cluster, agree=True, **ways)
        assert plan.layout.devices == world, plan
        pipe = plan.distributed(loss_fn=F.mse_loss)
        share = slice(None)
        if replicas > 1:
            each = len(x) // replicas
            share = slice(rank // plan.layout.ranks * each, (rank // plan.layout.ranks + 1) * each)
        model.zero_grad()
        pipe.step(x[share], target=target[share])
        for key, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, want[key], rtol=1e-4, atol=1e-6)
        ran.add((name, replicas, plan.layout.checkpoint))
    assert {name for name, *_ in ran} == set(SCHEDULES)
    assert {checkpoint for *_, checkpoint in ran} == {False, True}, ran
    with pytest.raises(PartitionError, match=r"memory=10 per device is too little on 2 devices"):
        plan_pipeline(model, (x,), cluster=Cluster.of({"devices": 2, "memory": 10, "link": FREE}), agree=True)
    print(f"{len(ran)} kinds of plans ran, replicas {sorted({r for _, r, _ in ran})}", flush=True)
