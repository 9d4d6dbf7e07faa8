"""Cases of ranks: stages whose modules are divided over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline import keyed_random, split
from intarsia.pipeline.distributed.placement import whole

PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Block(nn.Module):
    """A block of a transformer without attention; dropout behind the part that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)]).train()


def mesh_of(*names: str):
    shape = [2] * len(names)
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)


def plain_run(layers, steps: int, count: int):
    """The losses, norms and weights of a plain loop over micro-batches with the same keys."""
    model, (x, target) = model_of(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for i, (part, aim) in enumerate(zip(x.chunk(count), target.chunk(count), strict=True)):
            with keyed_random(5, step, i, layers=layers(model)):
                loss = F.mse_loss(model(part), aim) / count
                loss.backward()
            total += loss.item()
        losses.append((total, nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
    return losses, model.state_dict()


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=draw), torch.randn(8, 8, generator=draw)


def tensor_trains(names: str, folder: str):
    """Dropout, clipping, AdamW, saved in the middle and resumed: the plain loop's losses and weights."""
    mesh = mesh_of(*names.split("+"))
    model, (x, target) = model_of(), batch()
    torch.manual_seed(dist.get_rank())  # each rank's own generator has no part in it
    if dist.get_rank() == dist.get_world_size() - 1:  # another start, which the first rank's replaces
        with torch.no_grad():
            [p.add_(1.0) for p in model.parameters()]

    def pipe_of():
        parts = split(copy.deepcopy(model), (x[:4],), stages=2, by="memory", way="modules")
        made = parts.distributed("1F1B", 2, loss_fn=F.mse_loss, mesh=mesh, tensor_plan=PLAN, seed=5)
        return parts, made, torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)

    parts, pipe, optimizer = pipe_of()
    up = next(p for n, p in pipe.named_parameters() if n.endswith("up.weight"))
    assert up.to_local().shape == (8, 8) and up.shape == (16, 8)
    losses = []
    for step in range(4):
        if step == 2:
            pipe.save(folder, optimizer)
            parts, pipe, optimizer = pipe_of()
            pipe.load(folder, optimizer)
        pipe.zero_grad()
        result = pipe.step(pipe.shard(x), target=pipe.shard(target))
        norm = pipe.clip_grad_norm_(0.5).item()
        losses.append((0.0 if result.loss is None else result.loss.item(), norm))
        optimizer.step()
    want, weights = plain_run(parts.layers, 4, 2 * pipe.world.replicas)
    for (loss, norm), (plain_loss, plain_norm) in zip(losses, want, strict=True):
        assert not pipe.is_last or loss == pytest.approx(plain_loss, abs=2e-6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(whole(value), weights[key], rtol=1e-4, atol=2e-6)
    print(f"tensor_trains {names} ok", flush=True)


def tensor_refusals():
    """What cannot be divided is refused on every rank, with the reason."""
    mesh, (x, target) = mesh_of("pipeline", "tensor"), batch()
    by_graph = split(model_of(), (x,), stages=2, by="memory")
    parts = split(model_of(), (x,), stages=2, by="memory", way="modules")
    options = {"loss_fn": F.mse_loss, "mesh": mesh}
    for stages, plan, words in (
        (by_graph, PLAN, "stages cut by the graph call no modules: use split"),
        (parts, None, "has a dimension 'tensor', which needs tensor_plan="),
        (parts, {"*.upp": ColwiseParallel()}, r"names '\*.upp', which no stage calls; did you mean '3.up'"),
    ):
        with pytest.raises(PartitionError, match=words):
            stages.distributed("1F1B", 2, tensor_plan=plan, **options)
    with pytest.raises(PartitionError, match="tensor_plan= needs mesh= with a dimension 'tensor'"):
        parts.distributed("1F1B", 2, tensor_plan=PLAN, loss_fn=F.mse_loss)
    both = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "tensor", "shard"))
    with pytest.raises(PartitionError, match="'shard' and 'tensor' both divide stages"):
        parts.distributed("1F1B", 2, tensor_plan=PLAN, loss_fn=F.mse_loss, mesh=both)
    line = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sharded = split(line, (x,), cuts=[1], way="modules", by="memory")
    given = {"0": ColwiseParallel(use_local_output=False)}
    pipe = sharded.distributed("1F1B", 2, tensor_plan=given, **options)
    with pytest.raises(
        (PartitionError, PipelineError), match="_0 crosses a border and is a DTensor, of which"
    ):
        pipe.step(x, target=target)
    parts = split(model_of(), (x,), stages=2, by="memory", way="modules")
    pipe = parts.distributed("1F1B", 2, tensor_plan=PLAN, **options)
    mine = x.double() if dist.get_rank() == 1 else x
    with pytest.raises(InputError, match="is float64" if dist.get_rank() == 1 else "rank 1 refused"):
        pipe.step(mine, target=target)
    print("tensor_refusals ok", flush=True)
