"""Fork, join, phonies and streams on the CPU: the order of the backward pass."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from intarsia.pipeline.gpipe.checkpoint import Checkpointing, is_checkpointing, is_recomputing
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.stream import (
    Copy,
    CPUStream,
    Fork,
    Join,
    Wait,
    current_stream,
    fork,
    get_device,
    get_phony,
    is_cuda,
    join,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

cpu = torch.device("cpu")


class Plain:
    """A function without effects: its second run needs no context."""

    record = replay = backward = staticmethod(nullcontext)

    def __init__(self, function):
        self.function = function

    def __call__(self, value):
        return self.function(value)


def checkpoint(function, value):
    checkpointing = Checkpointing(Plain(function), Batch(value))
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.value


def logging(timeline):
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, tensor):
            timeline.append(f"{number}:forward")
            ctx.number = number
            return tensor.detach()

        @staticmethod
        def backward(ctx, grad):
            timeline.append(f"{ctx.number}:backward")
            return None, grad

    return Log.apply


def test_joined_runs_backward_before_forked():
    timeline = []
    log = logging(timeline)
    a = torch.rand(1, requires_grad=True)
    b = torch.rand(1, requires_grad=True)
    a = log(1, a)
    a, phony = fork(a)
    b = join(log(2, b), phony)
    (a + b).backward()
    assert timeline == ["1:forward", "2:forward", "2:backward", "1:backward"]


def test_checkpoints_in_series():
    timeline = []
    log = logging(timeline)
    a = torch.rand(1, requires_grad=True)
    b = torch.rand(1, requires_grad=True)
    _ = a + 1 + 2 + 3 + 4 + 5  # moves autograd's own counter on
    a = checkpoint(partial(log, "a"), a)
    a, phony = fork(a)
    b = checkpoint(partial(log, "b"), join(b, phony))
    torch.cat((a, b)).sum().backward()
    assert timeline == ["a:forward", "b:forward", "b:forward", "b:backward", "a:forward", "a:backward"]


def test_nodes_with_gradients():
    x, phony = fork(torch.rand(1, requires_grad=True))
    assert type(x.grad_fn) is type(phony.grad_fn) is Fork._backward_cls
    joined = join(x, phony)
    assert joined is not x and type(joined.grad_fn) is Join._backward_cls


def test_nothing_happens_without_gradients(monkeypatch):
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    x = torch.rand(1, requires_grad=True)
    with torch.no_grad():
        forked, phony = fork(x)
        assert forked is x and not phony.requires_grad
        assert join(x, phony) is x


def test_join_gives_gradients_on():
    a, b = torch.rand(2, 1).chunk(2)
    plain, phony = fork(a)
    assert not plain.requires_grad and not phony.requires_grad and not join(b, phony).requires_grad
    a, phony = fork(a.requires_grad_())
    assert join(b, phony).requires_grad


def test_fork_leaks_nothing():
    leak = None

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            nonlocal leak
            leak = weakref.ref(ctx)
            return grad

    x, phony = fork(Identity.apply(torch.rand(1, requires_grad=True)))
    x = join(x, phony)
    x.backward()
    del x, phony
    assert leak() is None


def test_phony():
    assert get_phony(cpu, requires_grad=False).shape == (0,)
    with torch.inference_mode():
        phony = get_phony(cpu, requires_grad=True)
    assert phony.requires_grad and not phony.is_inference()
    assert get_phony(cpu, requires_grad=True) is phony
    assert get_phony(cpu, requires_grad=False) is not phony


def test_cpu_streams():
    assert new_stream(cpu) is current_stream(cpu) is CPUStream
    assert get_device(CPUStream) == cpu and not is_cuda(CPUStream)
    with use_device(cpu), use_stream(CPUStream):
        wait_stream(CPUStream, CPUStream)
        record_stream(torch.rand(1), CPUStream)


def test_copy_and_wait():
    x = torch.ones(100, requires_grad=True)
    (y,) = Copy.apply(CPUStream, CPUStream, x)
    (y,) = Wait.apply(CPUStream, CPUStream, y)
    y.norm().backward()
    torch.testing.assert_close(x.grad.sum(), torch.tensor(10.0))
    z, n = Wait.apply(CPUStream, CPUStream, x, torch.arange(3))
    assert type(z.grad_fn) is Wait._backward_cls and not n.requires_grad


def test_checkpoint_makes_gradients_possible():
    batch = Batch(torch.rand(1))
    checkpointing = Checkpointing(Plain(lambda x: x * 2), batch)
    output = checkpointing.checkpoint()
    assert output[0].requires_grad
    checkpointing.recompute(output)
    assert output[0].requires_grad
    output.tensor.backward()
    a = torch.rand(1, requires_grad=True)
    x = torch.rand(1)
    checkpoint(lambda x: x * a, x).backward()
    assert torch.equal(a.grad, x)


@pytest.mark.parametrize(
    "structure", [lambda x: x, lambda x: (x * 2, torch.rand(1)), lambda x: {"x": x, "n": 1}]
)
def test_checkpoint_is_known_inside(structure):
    seen = []

    def function(x):
        seen.append((is_checkpointing(), is_recomputing()))
        return structure(x)

    output = checkpoint(function, torch.rand(1, requires_grad=True))
    next(iter(Batch(output))).backward()
    assert seen == [(True, False), (False, True)]
    assert (is_checkpointing(), is_recomputing()) == (False, False)
    function(torch.rand(1))
    assert seen[-1] == (False, False)
