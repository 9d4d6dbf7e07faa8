"""Cases of ranks: training."""

from __future__ import annotations

import copy
import functools
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from pipeline_zoo import make
from rank_worker import SCHEDULES, close, loss_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.distributed.saved import read_checkpoint
from intarsia.pipeline.planner import plan_pipeline
from intarsia.pipeline.schedules import SCHEDULES as PLANNED
from intarsia.pipeline.split import split


def check_gradients(pipe, want, where):
    for module in pipe:
        for n, p in module.named_parameters(remove_duplicate=False):
            if want[n] is not None:
                close(p.grad, want[n], f"{where} {n}")


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def autocast(name="mlp", *only):
    """Under bf16 autocast gradients are those of the plain model's micro-batches under the same autocast."""
    schedules = {k: v for k, v in SCHEDULES.items() if not only or k in only}
    model, args, kwargs = make(name)
    model.eval()
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t]), (args, kwargs))
    target = torch.arange(args[0].shape[0])
    plain = copy.deepcopy(model)
    for i in range(4):
        part, more = pytree.tree_map_only(torch.Tensor, lambda t, i=i: t.chunk(4)[i], (args, kwargs))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(plain(*part, **more), target.chunk(4)[i]) / 4
        loss.backward()
    cut = {n: split(model, args, kwargs, stages=n, by="memory") for n in {*schedules.values()}}
    for schedule, stages in schedules.items():
        for checkpoint in (False, True):
            model.zero_grad()
            pipe = cut[stages].distributed(schedule, 4, loss_fn=loss_of, checkpoint=checkpoint)
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step(*args, target=target, **kwargs)
            check_gradients(pipe, gradients(plain), f"autocast {schedule} {checkpoint}")
            model.zero_grad()
            pipe.step(*args, target=target, **kwargs)  # and without it again
    print(f"autocast {name} ok", flush=True)


def autocast_on_one_rank():
    model, (x,), _ = make("mlp")
    pipe = split(model, (x,), stages=2, by="memory").distributed("1F1B", 2, loss_fn=loss_of)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1),
        pytest.raises(InputError, match=r"autocast to torch\.bfloat16"),
    ):
        pipe.step(x, target=torch.arange(4))
    print("autocast_on_one_rank ok", flush=True)


class Tagger(nn.Module):
    """A label for each token."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.table(ids)))).transpose(1, 2)


class WithLoss(Tagger):
    """The same, that also computes its loss."""

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return F.cross_entropy(logits, labels)


def token_means():
    """Micro-batches with different numbers of labels, one of them with none, weigh by their labels."""
    torch.manual_seed(0)
    model = Tagger()
    ids, labels = torch.randint(0, 20, (8, 6)), torch.randint(0, 5, (8, 6))
    labels[0, 1:] = labels[1, 2:] = labels[4:6] = -100
    weights = torch.rand(5)
    parts = split(model, (ids,), stages=2, by="memory")
    for loss_fn in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=weights),
        F.cross_entropy,
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        functools.partial(F.cross_entropy, reduction="sum"),
    ):
        model.zero_grad()
        plain = copy.deepcopy(model)
        want = loss_fn(plain(ids), labels)
        want.backward()
        pipe = parts.distributed("1F1B", 4, loss_fn=loss_fn)
        result = pipe.step(ids, target=labels)
        if pipe.is_last:
            torch.testing.assert_close(result.loss, want.detach())
        check_gradients(pipe, gradients(plain), loss_fn)

    def own(logits, target):
        return F.cross_entropy(logits, target)

    plain = copy.deepcopy(model)
    plain.zero_grad()
    F.cross_entropy(plain(ids[2:4]), labels[2:4]).backward()
    labels[4:6] = labels[2:4]
    model.zero_grad()
    pipe = parts.distributed("1F1B", 4, loss_fn=own)
    words = (
        "Use loss_weight=" if pipe.is_last else "rank 1 failed with PipelineError in the loss of the whole"
    )
    with pytest.raises(PipelineError, match=words):
        pipe.step(ids, target=labels)
    model.zero_grad()
    pipe = parts.distributed("1F1B", 4, loss_fn=own, loss_weight=lambda target: (target != -100).sum())
    pipe.step(ids, target=labels)
    plain.zero_grad()
    own(plain(ids), labels).backward()
    check_gradients(pipe, gradients(plain), "loss_weight")
    print("token_means ok", flush=True)


def loss_inside():
    torch.manual_seed(0)
    model = WithLoss()
    ids, labels = torch.randint(0, 20, (8, 6)), torch.randint(0, 5, (8, 6))
    labels[:3, 2:] = -100
    parts = split(model, (ids, labels), stages=2, by="memory")
    with pytest.raises(PartitionError, match="computes a mean over tokens itself"):
        parts.distributed("1F1B", 4, loss_fn=lambda loss: loss)
    plain = copy.deepcopy(model)
    plain(ids, labels).backward()
    pipe = parts.distributed(
        "1F1B", 4, loss_fn=lambda loss, _: loss, loss_weight=lambda target: (target != -100).sum()
    )
    pipe.step(ids, labels, target=labels)
    check_gradients(pipe, gradients(plain), "loss inside")
    print("loss_inside ok", flush=True)


class Saved:
    """The most elements that autograd held at one time."""

    def __init__(self):
        self.now = self.peak = 0

    def pack(self, tensor):
        self.now += tensor.numel()
        self.peak = max(self.peak, self.now)
        held = tensor.detach()
        weakref.finalize(held, self.drop, tensor.numel())
        return held

    def drop(self, count):
        self.now -= count


def recomputing(name="resnet", *only):
    """Equal gradients and buffers, and less kept between the passes."""
    schedules = {k: v for k, v in SCHEDULES.items() if not only or k in only}
    model, args, kwargs = make(name)
    model.train()
    args = tuple(torch.cat([a, a]) for a in args)
    target = torch.arange(args[0].shape[0])
    kept, found, buffers = {}, {}, {}
    start = copy.deepcopy(model.state_dict())
    cut = {n: split(model, args, kwargs, stages=n, by="memory") for n in {*schedules.values()}}
    for schedule, stages in schedules.items():
        for checkpoint in (False, True, [0]):
            model.load_state_dict(start)
            model.zero_grad()
            options = {"loss_fn": loss_of, "checkpoint": checkpoint, "check_loss": False}
            pipe = cut[stages].distributed(schedule, 4, **options)
            saved = Saved()
            with saved_tensors_hooks(saved.pack, lambda t: t):
                pipe.step(*args, target=target, **kwargs)
            kept[str(checkpoint)] = saved.peak
            found[str(checkpoint)] = {n: g.clone() for n, g in gradients(pipe).items() if g is not None}
            buffers[str(checkpoint)] = copy.deepcopy(dict(pipe.named_buffers()))
        for other in ("True", "[0]"):
            for n, g in found["False"].items():
                close(found[other][n], g, f"{schedule} {other} {n}")
            for n, b in buffers["False"].items():
                torch.testing.assert_close(buffers[other][n], b)
        assert kept["True"] < kept["False"], (schedule, kept)
    print(f"recomputing {name} ok", flush=True)


def raises():
    """An exception in one stage is raised on every rank; afterwards the pipeline goes on."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    for schedule, stages in SCHEDULES.items():
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        parts = split(model, (x,), stages=stages, by="memory")
        pipe = parts.distributed(schedule, 4, loss_fn=loss_of)
        for failing in (0, 1):
            for when in ("forward", "backward"):
                part, calls = pipe[0], []

                def boom(*_, calls=calls, when=when):
                    calls.append(1)
                    if len(calls) == 3:
                        raise ValueError(f"boom in {when}")

                handle = None
                if pipe.rank == failing and when == "forward":
                    handle = part.register_forward_pre_hook(boom)
                elif pipe.rank == failing:
                    handle = next(part.parameters()).register_hook(boom)
                error = ValueError if pipe.rank == failing else PipelineError
                words = (
                    f"boom in {when}" if pipe.rank == failing else f"rank {failing} failed with ValueError"
                )
                with pytest.raises(error, match=words):
                    pipe.step(x, target=torch.arange(8))
                if handle is not None:
                    handle.remove()
        model.zero_grad()
        plain = copy.deepcopy(model)
        loss_of(plain(x), torch.arange(8)).backward()
        pipe.step(x, target=torch.arange(8))
        check_gradients(pipe, gradients(plain), f"after failures {schedule}")
        print(f"raises {schedule} ok", flush=True)


def bad_loss():
    """An exception in the loss is raised on every rank."""
    model, (x,), _ = make("mlp")
    pipe = split(model, (x,), stages=2, by="memory").distributed("1F1B", 2, loss_fn=lambda y, t: y @ t)
    error = RuntimeError if pipe.is_last else PipelineError
    with pytest.raises(error):
        pipe.step(x, target=torch.arange(4))
    print("bad_loss ok", flush=True)


def plans(*counts):
    """Every plan of a grid runs, and gives the plain model's gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    x, target = torch.rand(16, 6), torch.arange(16)
    plain = copy.deepcopy(model)
    loss_of(plain(x), target).backward()
    ran = 0
    for schedule in PLANNED:
        for microbatches in map(int, counts):
            for memory in (None, 3000):
                given = [None]
                try:
                    given[0] = plan_pipeline(
                        model,
                        (x,),
                        devices=2,
                        schedules=[schedule],
                        microbatches=[microbatches],
                        memory=memory,
                    )
                except PartitionError as error:
                    given[0] = str(error)
                dist.broadcast_object_list(given := [_summary(given[0])], src=0)
                if isinstance(given[0], str):
                    continue
                name, count, checkpoint, cuts = given[0]
                model.zero_grad()
                parts = split(model, (x,), stages=len(cuts) + 1, cuts=cuts)
                pipe = parts.distributed(name, count, checkpoint=checkpoint, loss_fn=loss_of)
                pipe.step(x, target=target)
                check_gradients(pipe, gradients(plain), f"plan {name} {count} {checkpoint}")
                ran += 1
    assert ran >= 2 * len(counts), ran
    print(f"plans ok: {ran} ran", flush=True)


def clipping(name="gpt2"):
    """The norm over all ranks is the plain model's, tied weights counted once."""
    model, args, kwargs = make(name)
    model.eval()
    target = torch.arange(args[0].shape[0])
    pipe = split(model, args, kwargs, stages=2, by="memory").distributed("1F1B", 2, loss_fn=loss_of)
    with pytest.raises(PartitionError, match=r"torch\.optim\.LBFGS computes with the gradients of all"):
        torch.optim.LBFGS(pipe.parameters()).step(lambda: 0.0)  # the first step of all
    for norm_type in (2.0, 1.0, float("inf")):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        loss_of(plain(*args, **kwargs), target).backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type)
        pipe.zero_grad()
        pipe.step(*args, target=target, **kwargs)
        got = pipe.clip_grad_norm_(1e-3, norm_type)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
        for n, p in pipe.named_parameters():
            wanted = dict(plain.named_parameters(remove_duplicate=False))[n].grad
            if wanted is not None:
                torch.testing.assert_close(p.grad, wanted, rtol=1e-3, atol=1e-8)
    refused_clipping(pipe)
    print("clipping ok", flush=True)


def refused_clipping(pipe):
    """NaN on one rank counts on every rank; what a rank cannot do alone is refused."""
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    for rank in range(dist.get_world_size()):
        for gradient in gradients:
            gradient.fill_(math.nan if rank == dist.get_rank() else 1.0)
        for norm_type in (2.0, float("inf")):
            with pytest.raises(RuntimeError, match="gradients from `parameters` is non-finite"):
                pipe.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    assert pipe.clip_grad_norm_(1.0, float("inf")).isnan()
    with pytest.raises(InputError, match=r"norm_type is 0\.0; over ranks, it is a positive number"):
        pipe.clip_grad_norm_(1.0, 0)


def checkpoints(folder):
    """A checkpoint of one cut resumes in another cut and schedule, and in the plain model, equally."""
    torch.manual_seed(0)
    first = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    x, target = torch.rand(8, 6), torch.arange(8)

    def train(pipe, optimizer, steps):
        losses = []
        for _ in range(steps):
            pipe.zero_grad()
            result = pipe.step(x, target=target)
            optimizer.step()
            losses.append(None if result.loss is None else result.loss.item())
        return losses

    pipe = split(first, (x,), stages=2, cuts=[2]).distributed("1F1B", 4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    train(pipe, optimizer, 3)
    pipe.save(folder, optimizer)
    want = train(pipe, optimizer, 3)

    other = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    again = split(other, (x,), stages=4, cuts=[1, 2, 4]).distributed("Interleaved1F1B", 4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1.0)
    again.load(folder, optimizer)
    got = train(again, optimizer, 3)
    if again.is_last:
        torch.testing.assert_close(got, want)
    plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    plain.load_state_dict(read_checkpoint(folder))
    if again.is_last:
        torch.testing.assert_close(loss_of(plain(x), target).item(), got[0])
    again.load_state_dict(plain.state_dict())
    for n, p in again.named_parameters():
        assert torch.equal(p, dict(plain.named_parameters())[n])
    with pytest.raises(InputError, match="unexpected"):
        again.load_state_dict(plain.state_dict() | {"more": x})
    with pytest.raises(InputError, match="has no checkpoint"):
        again.load(folder + "/nothing")
    print("checkpoints ok", flush=True)


def _summary(plan):
    if isinstance(plan, str):
        return plan
    choice = plan.choice
    return choice.schedule, choice.microbatches, choice.checkpoint, list(choice.cuts)
