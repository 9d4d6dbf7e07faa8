"""What `intarsia pipeline run` shows: a small language model trained over several processes."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from intarsia.errors import PipelineError
from intarsia.pipeline.distributed.pipeline import DistributedPipeline
from intarsia.pipeline.distributed.start import start_process_group
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import SCHEDULES, schedule
from intarsia.pipeline.split import split

Echo = Callable[[str], None]


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the next token at every place."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run_rank(
    name: str, microbatches: int, steps: int, per_rank: int, timeout: float, echo: Echo
) -> list[float] | None:
    """One rank: cut, compare the first step with the plain model, train; the last loss on the last stage."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    backend = "nccl" if cuda and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "gloo"
    start_process_group(backend, timedelta(seconds=timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyGPT()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 256, (4 * microbatches, 32))
    parts = split(model, (ids[:4],), stages=world * per_rank, agree=True)
    pipe = parts.distributed(name, microbatches, loss_fn=next_token_loss)
    if rank == 0:
        echo(str(parts.report))
    result = pipe.step(ids, target=ids)
    worst = _compare(pipe, plain, ids)
    echo(
        f"rank {rank}: stages {pipe.held}, gradients equal the plain model's (largest difference {worst:.1e})"
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    optimizer.zero_grad()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        result = pipe.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    if result.loss is not None:
        echo(
            f"rank {rank}: loss {result.loss.item():.4f} after {steps} steps,"
            f" {min(seconds) * 1e3:.1f} ms a step"
        )
        if name in SCHEDULES:
            predicted = simulate(schedule(name, world, microbatches, per_rank), parts.report.costs)
            echo(f"rank {rank}: predicted {predicted.step_time * 1e3:.1f} ms, bubble {predicted.bubble:.0%}")
    dist.barrier()
    dist.destroy_process_group()
    return None if result.loss is None else [result.loss.item()]


def _compare(pipe: DistributedPipeline, plain: nn.Module, ids: torch.Tensor) -> float:
    """The largest difference between this rank's gradients and the plain model's."""
    torch.autograd.backward(next_token_loss(plain(ids), ids))
    want = dict(plain.named_parameters(remove_duplicate=False))
    worst = 0.0
    for module in pipe.modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            expected = want[name].grad
            assert parameter.grad is not None and expected is not None
            worst = max(worst, float((parameter.grad.cpu() - expected).abs().max()))
    if worst > 1e-4:
        raise PipelineError(f"a gradient differs from the plain model's by {worst:.2e}")
    return worst
