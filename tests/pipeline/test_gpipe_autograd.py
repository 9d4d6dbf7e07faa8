"""What autograd offers beside a plain backward(): as for the plain module, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from intarsia.pipeline import GPipe

MODES = [("never", False), ("never", None), ("never", True), ("except_last", None), ("always", False)]


def model(checkpoint: str, concurrent: bool | None) -> tuple[nn.Sequential, GPipe]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    pipe = GPipe(
        copy.deepcopy(plain),
        [1, 2],
        devices=["cpu", "cpu"],
        chunks=3,
        checkpoint=checkpoint,
        concurrent_backward=concurrent,
    )
    return plain, pipe


def plain_graph(checkpoint: str, concurrent: bool | None) -> bool:
    return checkpoint == "never" and not concurrent


def test_without_devices_the_cpu_is_used():
    if torch.cuda.is_available():
        pytest.skip("there are CUDA devices")
    plain, _ = model("never", False)
    pipe = GPipe(copy.deepcopy(plain), [1, 2], chunks=3)
    x = torch.rand(6, 4)
    assert pipe.devices == [torch.device("cpu")] * 2
    torch.testing.assert_close(pipe(x), plain(x))


@pytest.mark.parametrize(("checkpoint", "concurrent"), MODES)
def test_gradients_of_chosen_tensors(checkpoint, concurrent):
    plain, pipe = model(checkpoint, concurrent)
    x = torch.rand(6, 4, requires_grad=True)
    parameter = list(pipe.parameters())[2]
    (got,) = torch.autograd.grad(pipe(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(plain(x).sum(), x)[0])
    assert all(p.grad is None for p in pipe.parameters()), "nothing is accumulated"
    pipe(x).sum().backward(inputs=[x])
    torch.testing.assert_close(x.grad, got)
    assert all(p.grad is None for p in pipe.parameters())
    if not plain_graph(checkpoint, concurrent):
        with pytest.raises(RuntimeError, match="of parameters need checkpoint='never'"):
            pipe(x).sum().backward(inputs=[parameter])
        with pytest.raises(RuntimeError, match="of parameters need checkpoint='never'"):
            torch.autograd.grad(pipe(x).sum(), [x, parameter])
        assert all(p.grad is None for p in pipe.parameters()), "nothing is accumulated"
        return
    pipe(x).sum().backward(inputs=[parameter])
    plain(x).sum().backward()
    torch.testing.assert_close(parameter.grad, list(plain.parameters())[2].grad)
    assert [p.grad is None for p in pipe.parameters()] == [True, True, False, True]


@pytest.mark.parametrize(("checkpoint", "concurrent"), MODES)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters(checkpoint, concurrent, kind):
    _, pipe = model(checkpoint, concurrent)
    calls = []
    handle = getattr(next(pipe.parameters()), kind)(lambda _: calls.append(1))
    x = torch.rand(6, 4)
    if plain_graph(checkpoint, concurrent):
        pipe(x).sum().backward()
        assert len(calls) == 1
    else:
        with pytest.raises(RuntimeError, match=r"shape \(4, 4\) has a hook"):
            pipe(x)
        with torch.no_grad():
            pipe(x)  # no gradient, no hook
    handle.remove()
    pipe(x).sum().backward()


def test_hooks_and_one_micro_batch():
    for checkpoint in ("never", "always"):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = GPipe(layers, [1, 1], devices=["cpu", "cpu"], checkpoint=checkpoint)
        calls = []
        next(pipe.parameters()).register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1))
        if checkpoint == "always":
            with pytest.raises(RuntimeError, match="has a hook"):
                pipe(torch.rand(6, 4))
        else:
            pipe(torch.rand(6, 4)).sum().backward()
            assert len(calls) == 1
