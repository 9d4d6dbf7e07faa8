"""Cases of ranks: every schedule against the plain model, batches, refusals, ranks that die."""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from pipeline_zoo import make
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.split import split

SCHEDULES = {
    "GPipe": 2,
    "1F1B": 2,
    "ZeroBubble": 2,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "ZBV": 4,
    "DualPipeV": 4,
}


def loss_of(output, target):
    tensors = [t for t in pytree.tree_leaves(output) if t.is_floating_point()]
    return sum(F.mse_loss(t, torch.zeros_like(t)) for t in tensors) + 0.0 * target.float().mean()


def close(got, want, where):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m: f"{where}: {m}")


def same_as_plain(name, *only):
    schedules = {k: v for k, v in SCHEDULES.items() if not only or k in only}
    model, args, kwargs = make(name)
    model.eval()  # no dropout: its draws differ with the order of micro-batches
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.repeat(2, *[1] * (t.ndim - 1)), (args, kwargs)
    )
    batch = next(t.shape[0] for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    target = torch.arange(batch)
    whole = copy.deepcopy(model)
    loss_of(whole(*args, **kwargs), target).backward()
    want_loss = loss_of(whole(*args, **kwargs), target).item()
    want_out = pytree.tree_leaves(whole(*args, **kwargs))
    grads = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    cut = {}
    for schedule, stages in schedules.items():
        model.zero_grad()
        if stages not in cut:
            cut[stages] = split(model, args, kwargs, stages=stages, by="memory")
        pipe = cut[stages].distributed(schedule, n_microbatches=4, loss_fn=loss_of)
        result = pipe.step(*args, target=target, **kwargs)
        if pipe.is_last:
            assert abs(result.loss.item() - want_loss) < 1e-5 * max(1, abs(want_loss)), (
                schedule,
                result.loss,
            )
            for got, want in zip(pytree.tree_leaves(result.output), want_out, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for module in pipe:
            for n, p in module.named_parameters(remove_duplicate=False):
                if grads[n] is None:
                    assert p.grad is None or not p.grad.any(), n
                    continue
                close(p.grad, grads[n], f"{schedule} {n}")
        # A second step adds the same again, tied weights included.
        pipe.step(*args, target=target, **kwargs)
        assert next(pipe.parameters()) is next(p for _, p in pipe.named_parameters())  # as nn.Module's do
        for p in pipe.parameters():
            n = next(n for m in pipe for n, q in m.named_parameters() if q is p)
            if grads[n] is not None:
                torch.testing.assert_close(p.grad, 2 * grads[n], rtol=1e-4, atol=2e-6)
        check_inference(pipe, whole, args, kwargs, schedule)
        print(f"{name} {schedule} ok", flush=True)


def check_inference(pipe, whole, args, kwargs, where):
    """Forward alone equals the plain model, twice, also between two training steps; no gradient changes."""
    before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    for _ in range(2):
        out = pipe.infer(*args, **kwargs)
        assert (out is None) == (not pipe.is_last), where
        if pipe.is_last:
            leaves = zip(pytree.tree_leaves(out), pytree.tree_leaves(whole(*args, **kwargs)), strict=True)
            for got, want in leaves:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")
    for p, grad in zip(pipe.parameters(), before, strict=True):
        assert (p.grad is None) == (grad is None) and (grad is None or torch.equal(p.grad, grad)), where


def trains(name="gpt2"):
    """Ten optimizer steps end where the plain model's do."""
    model, args, kwargs = make(name)
    model.eval()
    plain = copy.deepcopy(model)
    target = torch.arange(args[0].shape[0])
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(plain(*args, **kwargs), target).backward()
        optimizer.step()
    parts = split(model, args, kwargs, stages=2, agree=True)
    pipe = parts.distributed("1F1B", n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        pipe.step(*args, target=target, **kwargs)
        optimizer.step()
    want = plain.state_dict()
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, want[key], rtol=1e-3, atol=1e-4)
    print("trains ok", flush=True)


def lengths():
    """What does not fit is refused on every rank; another length is taken up; nothing hangs."""
    model = make("mlp")[0]
    target = torch.arange(8)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    parts = split(model, (x,), stages=2, by="memory")
    pipe = parts.distributed("1F1B", n_microbatches=4, loss_fn=loss_of)
    pipe.step(x, target=target)
    with pytest.raises(InputError, match="9" if pipe.is_first else "rank 0 refused this batch"):
        pipe.step(torch.cat([x, x[:, :1]], 1), target=target)
    result = pipe.step(x[:4], target=target[:4])  # of one sample each
    if pipe.is_last:
        torch.testing.assert_close(result.output, model(x[:4]))
    with pytest.raises(InputError, match="the batch has 8 samples, and the target 5"):
        pipe.step(x, target=target[:5])
    longer = torch.cat([x, x, x])
    model.zero_grad()
    result = pipe.step(longer, target=torch.arange(24))
    if pipe.is_last:
        torch.testing.assert_close(result.output, model(longer))
    out = pipe.infer(x)
    assert (out is None) == (not pipe.is_last)
    if out is not None:
        torch.testing.assert_close(out, model(x))
    print("lengths ok", flush=True)


class Odd(nn.Module):
    """Whole numbers, booleans, views, a frozen first part, a scalar and a whole input at the borders."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.bias = nn.Embedding(4, 6)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table.weight.requires_grad_(False)

    def forward(self, ids, mask, scale):
        x = self.table(ids)
        flag = ids > 3
        turned = self.a(x).transpose(1, 2)
        own = self.bias.weight.sum(0, keepdim=True)
        y = self.b(turned.transpose(1, 2)) * mask.unsqueeze(-1) * scale
        y = torch.where(flag.unsqueeze(-1), y, own + x)
        z = self.c(y) + torch.sigmoid(turned.transpose(1, 2)) + own
        return {"z": z, "ids": ids, "kept": turned, "loss": z.square().mean()}


def odd():
    torch.manual_seed(0)
    model = Odd()
    ids = torch.randint(0, 8, (8, 3))
    mask = (torch.arange(3) < 2).to(torch.int8).repeat(8, 1)
    scale = torch.tensor(0.5)
    whole = copy.deepcopy(model)

    def loss_fn(output):
        return output["loss"] + output["kept"].mean()

    loss_fn(whole(ids, mask, scale)).backward()
    grads = {n: p.grad for n, p in whole.named_parameters()}
    example = (ids, mask, scale)
    cut = {n: split(model, example, stages=n, by="memory", slack=0.0) for n in {*SCHEDULES.values()}}
    for schedule, stages in SCHEDULES.items():
        model.zero_grad()
        pipe = cut[stages].distributed(schedule, n_microbatches=4, loss_fn=loss_fn)
        result = pipe.step(ids, mask, scale)
        if pipe.is_last:
            assert torch.equal(result.output["ids"], ids)
            assert result.output["loss"].shape == (4,)
            torch.testing.assert_close(result.loss, loss_fn(whole(ids, mask, scale)))
        for module in pipe:
            for n, p in module.named_parameters():
                if grads[n] is not None:
                    close(p.grad, grads[n], f"{schedule} {n}")
        print(f"odd {schedule} ok", flush=True)


def refusals():
    model, args, _ = make("mlp")
    with pytest.raises(PartitionError, match="one stage per rank: 3 stages, 2 ranks"):
        split(model, args, stages=3, by="memory").distributed("1F1B")
    with pytest.raises(PartitionError, match="two stages per rank: 2 stages, 2 ranks"):
        split(model, args, stages=2, by="memory").distributed("ZBV")
    with pytest.raises(PartitionError, match="schedule='2F2B' is none of"):
        split(model, args, stages=2, by="memory").distributed("2F2B")
    with pytest.raises(PartitionError, match="agree=True"):
        split(model, args, cuts=[2 + 2 * dist.get_rank()], by="memory").distributed("1F1B")
    print("refusals ok", flush=True)


def killed():
    """Rank 1 dies in its second step; rank 0 must say so, soon."""
    model = make("mlp")[0]
    x = torch.randn(8, 8)
    parts = split(model, (x,), stages=2, by="memory")
    steps = []

    def loss_fn(output, target):
        steps.append(1)
        if len(steps) > 4:
            os._exit(9)
        return loss_of(output, target)

    # Comparing the loss with the whole batch's would call it, and count, once more.
    pipe = parts.distributed("1F1B", n_microbatches=4, loss_fn=loss_fn, check_loss=False)
    pipe.step(x, target=torch.arange(8))
    begin = time.monotonic()
    with pytest.raises(PipelineError, match="lost rank 1 in the middle of a step"):
        pipe.step(x, target=torch.arange(8))
    print(f"killed ok after {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)


def killed_of_three():
    """Rank 1 dies; rank 0, whose process holds the store, waits until rank 2 has read of it."""
    model, x = make("mlp")[0], torch.randn(8, 8)
    pipe = split(model, (x,), stages=3, by="memory").distributed("GPipe", 4, loss_fn=loss_of)
    pipe.step(x, target=torch.arange(8))
    if dist.get_rank() == 1:
        os._exit(9)
    if dist.get_rank() == 2:
        time.sleep(8)  # it meets the broken connection when rank 0 has long known
    with pytest.raises(PipelineError, match=r"lost rank 1 in the middle of a step|lost rank 1 between steps"):
        pipe.step(x, target=torch.arange(8))
    print("killed ok", flush=True)
    os._exit(0)
