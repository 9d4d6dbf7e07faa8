"""Cases of ranks: batches of any size and place, and mixed precision."""

from __future__ import annotations

import copy

import pytest
import torch
from pipeline_zoo import ResNet, make
from rank_training import Tagger, check_gradients, gradients
from rank_worker import SCHEDULES, loss_of
from torch import nn
from torch.nn import functional as F

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split


def shorter(*schedules):
    """Batches that micro-batches do not divide, some so short that a micro-batch is empty."""
    torch.manual_seed(0)
    model = Tagger()
    ids, labels = torch.randint(0, 20, (8, 6)), torch.randint(0, 5, (8, 6))
    labels[0, 1:] = labels[4:6] = -100

    def own(output, target):
        return F.mse_loss(output, target.unsqueeze(1).expand_as(output).float())

    for schedule in schedules or SCHEDULES:
        parts = split(model, (ids,), stages=SCHEDULES[schedule], by="memory")
        for loss_fn in (nn.CrossEntropyLoss(), own):
            pipe = parts.distributed(schedule, 4, loss_fn=loss_fn)
            for count in (7, 5, 8, 3, 4, 1):  # two samples or more were captured
                model.zero_grad()
                plain = copy.deepcopy(model)
                want = loss_fn(plain(ids[:count]), labels[:count])
                want.backward()
                result = pipe.step(ids[:count], target=labels[:count])
                if pipe.is_last:
                    torch.testing.assert_close(result.loss, want.detach())
                    torch.testing.assert_close(result.output, plain(ids[:count]))
                check_gradients(pipe, gradients(plain), f"{schedule} {count}")
        out = pipe.infer(ids[:5])
        assert (out is None) == (not pipe.is_last)
        if out is not None:
            torch.testing.assert_close(out, model(ids[:5]))
        print(f"shorter {schedule} ok", flush=True)
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = split(norm, (torch.randn(8, 4),), stages=2, by="memory").distributed("1F1B", 4, loss_fn=loss_of)
    with pytest.raises(InputError, match=r"has 7 samples.* updates 1\.\w+, which copies"):
        pipe.step(torch.randn(7, 4), target=torch.arange(7))
    with pytest.raises(InputError, match=r"has 4 samples.*divide into 2 or more.* updates 1\.\w+"):
        pipe.step(torch.randn(4, 4), target=torch.arange(4))
    print("shorter ok", flush=True)


class TimeFirst(nn.Module):
    """Sequences with the batch on axis 1, and a mask of one entry for each sample in front."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, keep):
        y = torch.tanh(self.a(x)) * keep.view(1, -1, 1)
        return self.c(torch.tanh(self.b(y)))


def axes():
    torch.manual_seed(0)
    model = TimeFirst()
    x, keep, target = torch.randn(5, 8, 4), torch.rand(8), torch.randn(5, 8, 3)
    parts = split(model, (x, keep), stages=2, by="memory", batch_dims={"x": 1, "keep": 0})
    pipe = parts.distributed("1F1B", 4, loss_fn=F.mse_loss, target_axis=1)
    for count in (8, 7):
        model.zero_grad()
        plain = copy.deepcopy(model)
        given = x[:, :count], keep[:count]
        want = F.mse_loss(plain(*given), target[:, :count])
        want.backward()
        result = pipe.step(*given, target=target[:, :count])
        if pipe.is_last:
            torch.testing.assert_close(result.loss, want.detach())
            torch.testing.assert_close(result.output, plain(*given))
        check_gradients(pipe, gradients(plain), f"axes {count}")
    print("axes ok", flush=True)


def scaler():
    """fp16 with a scaler does what the plain loop does: steps, skips where it overflows, and scales."""
    model, (x,), _ = make("mlp")
    x, target = torch.cat([x, x]), torch.arange(8).float().view(8, 1).expand(8, 8)
    plain = copy.deepcopy(model)
    parts = split(model, (x,), stages=2, by="memory")

    def options():
        return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)

    def finish(scale, optimizer, clip):
        scale.unscale_(optimizer)
        clip(1.0)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()

    scale, optimizer = options(), torch.optim.SGD(plain.parameters(), lr=0.1)
    scales = []
    for _ in range(12):
        for part, aim in zip(x.chunk(4), target.chunk(4), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(plain(part), aim) / 4
            scale.scale(loss).backward()
        finish(scale, optimizer, lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most))
        scales.append(scale.get_scale())
    assert min(scales) < 2.0**20 and len(set(scales)) > 2, scales  # it overflowed, and grew again
    scale = options()
    pipe = parts.distributed("1F1B", 4, loss_fn=F.mse_loss, scaler=scale, check_loss=False)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for want in scales:
        with torch.autocast("cpu", torch.float16):
            result = pipe.step(x, target=target)
        if pipe.is_last:
            assert 0 < result.loss.item() < 100
        finish(scale, optimizer, pipe.clip_grad_norm_)
        assert scale.get_scale() == want
    for n, p in pipe.named_parameters():
        torch.testing.assert_close(p, dict(plain.named_parameters())[n], rtol=2e-3, atol=2e-4)
    if pipe.is_first:
        scale.update(1.0)
    with pytest.raises(
        InputError, match="every rank with trainable parameters needs a scaler, and all scalers must do"
    ):
        pipe.step(x, target=target)
    print("scaler ok", flush=True)


def named(*schedules):
    """Modules computed again by name, beside stages by number, give the same gradients and statistics."""
    torch.manual_seed(0)
    first = ResNet()
    x, target = torch.randn(8, 3, 8, 8), torch.arange(8)
    for schedule in schedules or ("1F1B", "ZBV"):
        found = []
        for checkpoint in (False, ["blocks.1", "blocks.0"], [0, "blocks.2"]):
            model = copy.deepcopy(first)
            parts = split(model, (x,), stages=SCHEDULES[schedule], by="memory")
            pipe = parts.distributed(schedule, 4, loss_fn=loss_of, checkpoint=checkpoint)
            pipe.step(x, target=target)
            found.append((pipe, gradients(model)))
        for pipe, _ in found[1:]:
            check_gradients(pipe, found[0][1], f"named {schedule}")
            for key, value in pipe.state_dict().items():
                torch.testing.assert_close(value, found[0][0].state_dict()[key])
    with pytest.raises(PartitionError, match=r"checkpoint names 'blocks\.9'"):
        parts.distributed(schedule, 4, loss_fn=loss_of, checkpoint=["blocks.9"])
    print("named ok", flush=True)
