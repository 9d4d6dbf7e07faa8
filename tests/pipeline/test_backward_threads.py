"""Stages on the CPU go backward at the same time, and autograd does not notice."""

from __future__ import annotations

import threading

import pytest
import torch
from pipeline_compare import threads_end
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.pipeline.gpipe.checkpoint import retains_graph

CONCURRENT = [("always", None), ("except_last", None), ("never", True)]


def on_backward(function):
    class Do(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            function()
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Do.apply(x)

    return Layer()


def pipe(*layers, checkpoint="except_last", concurrent=None, chunks=3):
    return GPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        devices=["cpu"] * len(layers),
        chunks=chunks,
        checkpoint=checkpoint,
        concurrent_backward=concurrent,
    )


@pytest.mark.parametrize(("checkpoint", "concurrent"), CONCURRENT)
def test_stages_meet_in_the_backward_pass(checkpoint, concurrent):
    meeting = threading.Barrier(2, timeout=20)
    names, counts = [set(), set()], [0, 0]

    def meet(stage):
        names[stage].add(threading.current_thread().name)
        counts[stage] += 1
        # Micro-batch i in the first stage meets micro-batch i-1 in the second.
        if (stage, counts[stage]) not in ((1, 1), (0, 4)):
            meeting.wait()

    model = pipe(
        on_backward(lambda: meet(0)),
        on_backward(lambda: meet(1)),
        checkpoint=checkpoint,
        concurrent=concurrent,
        chunks=4,
    )
    x = torch.rand(4, requires_grad=True)
    model(x).sum().backward()
    assert names == [{"stage 0_0"}, {"stage 1_0"}]
    assert torch.equal(x.grad, torch.ones(4))


def test_not_where_it_is_not_wanted():
    names = set()
    layer = on_backward(lambda: names.add(threading.current_thread()))
    for checkpoint, concurrent in (("never", None), ("always", False)):
        model = pipe(layer, nn.Identity(), checkpoint=checkpoint, concurrent=concurrent)
        model(torch.rand(4, requires_grad=True)).sum().backward()
    assert names == {threading.current_thread()}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize(("checkpoint", "concurrent"), CONCURRENT)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_the_backward_pass_reaches_the_caller(stage, checkpoint, concurrent, error):
    def fail():
        raise error("late")

    layers = [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    layers[stage] = on_backward(fail)
    before = threading.active_count()
    output = pipe(*layers, checkpoint=checkpoint, concurrent=concurrent)(torch.rand(6, 1, requires_grad=True))
    with pytest.raises(error) as caught:
        output.sum().backward()
    assert any(f"stage {stage}" in note for note in caught.value.__notes__)
    del output, caught
    assert threads_end(before)


@pytest.mark.parametrize(("checkpoint", "concurrent"), [*CONCURRENT, ("always", False)])
def test_a_retained_graph_is_walked_again(checkpoint, concurrent):
    model = pipe(nn.Linear(2, 2), nn.Linear(2, 2), checkpoint=checkpoint, concurrent=concurrent)
    x = torch.ones(6, 2, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    loss.backward()
    for grad, first in zip([x.grad, *(p.grad for p in model.parameters())], once, strict=True):
        torch.testing.assert_close(grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(("checkpoint", "concurrent"), [*CONCURRENT, ("always", False), ("never", None)])
def test_a_loss_may_leave_outputs_out(checkpoint, concurrent):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    first, last = nn.Linear(2, 2), Two()
    model = pipe(first, last, checkpoint=checkpoint, concurrent=concurrent)
    x = torch.rand(6, 2)
    model(x)[1].sum().backward()
    grads = first.weight.grad.clone(), last.b.weight.grad.clone()
    assert last.a.weight.grad is None
    first.zero_grad(), last.zero_grad()
    last(first(x))[1].sum().backward()
    torch.testing.assert_close(grads, (first.weight.grad, last.b.weight.grad))


@pytest.mark.parametrize(("checkpoint", "concurrent"), [*CONCURRENT, ("always", False)])
def test_second_order_is_refused(checkpoint, concurrent):
    model = pipe(nn.Linear(2, 2), nn.Tanh(), checkpoint=checkpoint, concurrent=concurrent)
    x = torch.rand(6, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="never"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(("checkpoint", "concurrent"), CONCURRENT)
def test_gradient_of_the_input_alone(checkpoint, concurrent):
    model = pipe(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1), checkpoint=checkpoint, concurrent=concurrent)
    x = torch.rand(6, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(nn.Sequential(*model)(x).sum(), x)
    (actual,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(expected, actual)


def test_two_pipelines_in_one_graph():
    one, two = pipe(nn.Linear(2, 2), nn.Tanh()), pipe(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.rand(6, 2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        (two(one(x)) + one(x)).sum().backward()
    grads = [x.grad.clone(), *(p.grad.clone() for p in [*one.parameters(), *two.parameters()])]
    x.grad = None
    one.zero_grad(), two.zero_grad()
    a, b = nn.Sequential(*one), nn.Sequential(*two)
    (b(a(x)) + a(x)).sum().backward()
    torch.testing.assert_close(grads, [x.grad, *(p.grad for p in [*one.parameters(), *two.parameters()])])


def test_autograd_tells_whether_the_retains_graph():
    """The one private name of torch used here; should it go, graphs are kept longer, and this notices."""
    seen = []
    for retain in (False, True):
        x = torch.rand(1, requires_grad=True)
        on_backward(lambda: seen.append(retains_graph()))(x).backward(retain_graph=retain)
    assert seen == [False, True]


def test_intra_op_threads_are_shared_and_given_back():
    before, seen = torch.get_num_threads(), []
    layer = on_backward(lambda: seen.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(4)
        pipe(layer, nn.Identity())(torch.rand(3, requires_grad=True)).sum().backward()
        assert seen == [2, 2, 2] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
