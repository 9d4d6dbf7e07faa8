"""Cut stages on one worker each equal the plain model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from pipeline_zoo import calm, make
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split


def scalar(output):
    return sum(t.float().square().mean() for t in pytree.tree_leaves(output) if t.is_floating_point())


@functools.lru_cache(maxsize=1)  # the two ways of a model follow each other
def cut(name):
    model, args, kwargs = make(name)
    calm(model)
    whole = copy.deepcopy(model)
    return model, whole, split(model, args, kwargs, stages=3, by="memory"), args, kwargs


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2", "t5"])
def test_pipelined_equals_the_model(name, checkpoint):
    model, whole, stages, args, kwargs = cut(name)
    model.zero_grad(), whole.zero_grad()
    want = whole(*args, **kwargs)
    scalar(want).backward()
    pipe = stages.gpipe(chunks=2, checkpoint=checkpoint)
    got = pipe(*args, **kwargs)
    assert type(got) is type(want)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b)
    scalar(got).backward()
    for (n, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=n: f"{n}: {m}")
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_statistics_are_updated_once_under_checkpointing():
    model, args, kwargs = make("resnet")
    whole = copy.deepcopy(model)
    for half in args[0].chunk(2):
        whole(half)
    pipe = split(model, args, kwargs, stages=3, by="memory").gpipe(chunks=2, checkpoint="always")
    scalar(pipe(*args)).backward()
    for (name, a), (_, b) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def test_inputs_without_a_batch_go_to_every_micro_batch():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, shift, scale):
            return self.b(torch.tanh(self.a(x + shift)) * scale) + shift

    model = Shifted()
    example = (torch.randn(6, 4), torch.randn(1, 4), torch.tensor(2.0))
    pipe = split(model, example, stages=2, by="memory").gpipe(chunks=3)
    torch.testing.assert_close(pipe(*example), model(*example))


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_micro_batches_of_one_sample_are_avoided(checkpoint):
    """Export takes a length of one for a case of its own: no part of a batch is that short."""
    model, (x,), _ = make("mlp")
    whole = copy.deepcopy(model)
    parts = split(model, (x,), stages=2, by="memory")
    for chunks, samples in ((2, 5), (3, 5), (4, 5), (3, 7), (4, 4), (2, 1)):
        pipe = parts.gpipe(chunks=chunks, checkpoint=checkpoint)
        batch = torch.randn(samples, 8)
        model.zero_grad(), whole.zero_grad()
        got, want = pipe(batch), whole(batch)
        torch.testing.assert_close(got, want)
        got.square().mean().backward()
        want.square().mean().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_one_sample_is_refused_where_a_copy_of_it_would_count():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = split(model, (torch.randn(8, 4),), stages=2, by="memory").gpipe(chunks=4)
    plain = copy.deepcopy(model)
    pipe(batch := torch.randn(5, 4))
    for part in (batch[:3], batch[3:]):
        plain(part)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    with pytest.raises(InputError, match=r"micro-batch 0 of 1: .*length of 1, but the stages were cut for 2"):
        pipe(batch[:1])
    pipe = split(model.eval(), (batch,), stages=2, by="memory").gpipe(chunks=4)
    torch.testing.assert_close(pipe(batch[:1]), model(batch[:1]))


def test_refusals():
    model, args, _ = make("mlp")
    parts = split(model, args, stages=2, by="memory")
    with pytest.raises(PartitionError, match="chunks=0"):
        parts.gpipe(chunks=0)

    class Mean(nn.Module):
        def forward(self, x):
            return torch.sin(x).mean()

    with pytest.raises(PartitionError, match="has no batch dimension in front"):
        split(Mean(), (torch.randn(4, 2),), stages=2, by="memory").gpipe(chunks=2)


def check_tied_over(devices, checkpoint):
    """Three steps of GPT-2, whose head is its embedding, on two devices, against the plain model."""
    model, args, kwargs = make("gpt2")
    calm(model)
    whole = copy.deepcopy(model)
    parts = split(model, args, kwargs, stages=2, by="memory")
    assert parts.tied, parts.report
    pipe = parts.gpipe(chunks=2, checkpoint=checkpoint, devices=devices)
    assert list(pipe.state_dict()) == list(whole.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in whole.named_parameters()]
    (weight,) = pipe.borrowed
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, whole)]
    given = pytree.tree_map_only(torch.Tensor, lambda t: t.to(devices[0]), (args, kwargs))
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        got, want = pipe(*given[0], **given[1]).logits, whole(*args, **kwargs).logits
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        copied = weight.places[0][0].__dict__[weight.places[0][1]]
        assert copied is not weight.owner and torch.equal(copied.cpu(), weight.owner.cpu())
        with torch.no_grad():
            pipe(*given[0], **given[1])  # a pass without gradients in between takes nothing away
        got.square().mean().backward()
        want.square().mean().backward()
        for (n, p), (_, q) in zip(pipe.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(
                p.grad.cpu(), q.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
    return parts


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tied_weights_on_two_devices(checkpoint):
    # For torch "cpu" and "cpu:0" are two devices, so that the weight is copied here as between others.
    parts = check_tied_over([torch.device("cpu"), torch.device("cpu:0")], checkpoint)
    again = parts.gpipe(chunks=2, devices=["cpu", "cpu"])  # what was borrowed is given back
    assert not again.borrowed and again.tied
    assert all(p is q for p, q in zip(again.parameters(), parts.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tied_weights_on_the_cpu_and_a_gpu(checkpoint):
    check_tied_over([torch.device("cuda:0"), torch.device("cpu")], checkpoint)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_stages_on_one_gpu():
    model, args, kwargs = make("gpt2")
    model.eval()
    want = model(*args, **kwargs).logits
    pipe = split(model, args, kwargs, stages=2, by="memory").gpipe(chunks=2, devices=["cuda:0", "cuda:0"])
    moved = pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), (args, kwargs))
    got = pipe(*moved[0], **moved[1]).logits
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    got.square().mean().backward()
    assert all(p.grad is not None and p.is_cuda for p in pipe.parameters())
