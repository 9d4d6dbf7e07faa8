"""Cases of ranks: replicas on a mesh, and ranks that die."""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from pipeline_zoo import make
from rank_training import Tagger, check_gradients, gradients
from rank_worker import loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.split import split


def mesh_of(replicas=2):
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline"))


class TiedTagger(Tagger):
    """A word for each token, with one table at both ends."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 20)
        self.head.weight = self.table.weight


def mesh_trains(name="tied"):
    """Twenty steps of two replicas of a pipeline with a tied weight end where the plain model's do."""
    if name == "tied":
        torch.manual_seed(0)
        model, ids, kwargs = TiedTagger(), torch.randint(0, 20, (4, 12)), {}
    else:
        model, (ids,), _ = make(name)
        kwargs = {"use_cache": False}
    model.eval()
    ids = torch.cat([ids, ids.flip(0)])
    labels = ids.clone()
    labels[:3, 4:] = -100  # the replicas average over different numbers of tokens

    def loss_fn(output, target):
        logits = output if isinstance(output, torch.Tensor) else output.logits.transpose(1, 2)
        return F.cross_entropy(logits, target)

    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    want = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_fn(plain(ids, **kwargs), labels)
        loss.backward()
        want.append(loss.item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    mesh = mesh_of()
    parts = split(model, (ids[:4],), kwargs, stages=2, by="memory")
    if mesh.get_local_rank("data") == 1:  # another start, which the first replica's replaces
        with torch.no_grad():
            for p in parts.parameters():
                p.add_(1.0)
    pipe = parts.distributed(
        "1F1B", 2, loss_fn=loss_fn, mesh=mesh, loss_weight=lambda target: (target != -100).sum()
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    got = []
    for _ in range(20):
        pipe.zero_grad()
        result = pipe.step(*pipe.shard((ids,)), target=pipe.shard(labels), **kwargs)
        if pipe.is_last:
            got.append(result.loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
    if pipe.is_last:
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-4, atol=1e-5)
    state = plain.state_dict()
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-3, atol=2e-4)
    print(f"mesh_trains {name} ok", flush=True)


def mesh_gradients():
    """Accumulated gradients, losses that are means over tokens, and sums: those of the whole batch."""
    torch.manual_seed(0)
    model = Tagger()
    model.spare = nn.Linear(2, 2)  # not used: it has no gradient, and so no weight decay
    ids, labels = torch.randint(0, 20, (8, 6)), torch.randint(0, 5, (8, 6))
    labels[0, 1:] = labels[1, 2:] = labels[4:6] = -100
    mesh = mesh_of()
    parts = split(model, (ids[:4],), stages=2, by="memory")
    for loss_fn, options in (
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(reduction="sum"), {}),
        (loss_of, {"loss_weight": "equal"}),
        (nn.CrossEntropyLoss(), {"uneven": True}),
    ):
        model.zero_grad()
        plain = copy.deepcopy(model)
        uneven = options.pop("uneven", False)
        for _ in range(2):
            want = loss_fn(plain(ids[: 7 if uneven else 8]), labels[: 7 if uneven else 8])
            want.backward()
        pipe = parts.distributed("1F1B", 2, loss_fn=loss_fn, mesh=mesh, **options)
        for _ in range(2):
            count = 3 if uneven and pipe.world.replica else 4
            result = pipe.step(pipe.shard(ids)[:count], target=pipe.shard(labels)[:count])
        if pipe.is_last:
            torch.testing.assert_close(result.loss, want.detach())
        check_gradients(pipe, gradients(plain), str(loss_fn))
        assert all(p.grad is None for n, p in pipe.named_parameters() if n.startswith("spare"))
    print("mesh_gradients ok", flush=True)


def mesh_refusals(folder):
    """What one replica refuses or fails with, every rank hears of; checkpoints are of one model."""
    model, (x,), _ = make("mlp")
    mesh = mesh_of()
    parts = split(model, (x,), stages=2, by="memory")
    target = torch.arange(4)
    for shape, names in (((2, 2), ("a", "b")), ((2, 2), ("pipeline", "expert")), ((4,), ("pipeline",))):
        other = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(
            PartitionError, match=r"it needs one of pipeline, pp.*one of tensor, tp, and no others"
        ):
            parts.distributed("1F1B", 2, loss_fn=loss_of, mesh=other)
    with pytest.raises(PartitionError, match="not both"):
        parts.distributed("1F1B", 2, loss_fn=loss_of, mesh=mesh, group=mesh.get_group("pipeline"))
    pipe = parts.distributed("1F1B", 2, loss_fn=loss_of, mesh=mesh)
    words = "numbers of elements, and for this loss" if pipe.is_last else "rank 1 refused this batch"
    with pytest.raises(InputError, match=words):
        pipe.step(x, target=target)
    pipe = parts.distributed("1F1B", 2, loss_fn=loss_of, mesh=mesh, loss_weight="equal")
    with pytest.raises(InputError, match="5 samples does not divide among 2 replicas"):
        pipe.shard(torch.ones(5))
    mine = x if pipe.world.replica == 0 else x.double()
    refused = dist.get_rank() == 2
    with pytest.raises(InputError, match="is float64" if refused else "rank 2 refused this batch"):
        pipe.step(mine, target=target)
    mine = x[: 4 if pipe.world.replica == 0 else 3]
    with pytest.raises(InputError, match="the batch has 3 samples, and the target 4"):
        pipe.step(mine, target=target)
    handle = None
    if dist.get_rank() == 3:

        def boom(*_):
            raise ValueError("boom")

        handle = pipe[0].register_forward_pre_hook(boom)
    error, words = (ValueError, "boom") if handle else (PipelineError, "rank 3 failed with ValueError")
    with pytest.raises(error, match=words):
        pipe.step(x, target=target)
    if handle:
        handle.remove()
    pipe.zero_grad()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    pipe.step(x, target=target)
    optimizer.step()
    pipe.save(folder, optimizer)
    kept = {k: v.clone() for k, v in pipe.state_dict().items()}
    pipe.step(x, target=target)
    optimizer.step()
    pipe.load(folder, optimizer)
    assert all(torch.equal(v, kept[k]) for k, v in pipe.state_dict().items())
    print("mesh_refusals ok", flush=True)


def dies(victim="1"):
    """One rank of several dies in its second step; each of the others names it, soon."""
    world, victim = dist.get_world_size(), int(victim)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2 * world)])
    x = torch.randn(8, 8)
    parts = split(model, (x,), stages=world, by="memory")
    pipe = parts.distributed("1F1B", 4, loss_fn=loss_of)
    pipe.step(x, target=torch.arange(8))
    if dist.get_rank() == victim:
        pipe[0].register_forward_pre_hook(lambda *_: os._exit(9))
    begin = time.monotonic()
    with pytest.raises(PipelineError, match=rf"lost rank {victim} in the middle of a step"):
        pipe.step(x, target=torch.arange(8))
    took = time.monotonic() - begin
    assert took < 30, took
    print(f"dies ok after {took:.1f} s", flush=True)
    # The process that holds the store goes last, as under a launcher.
    time.sleep(3.0 if dist.get_rank() == 0 else 0.0)
    os._exit(0)
