"""The pipeline on CUDA: streams, copies between devices, random numbers, memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intarsia.pipeline import GPipe, keyed_random, pop, skippable, stash
from intarsia.pipeline.balance import balance_by_size, balance_by_time
from intarsia.pipeline.gpipe.stream import (
    Copy,
    CPUStream,
    Wait,
    current_stream,
    get_device,
    new_stream,
    use_stream,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = ["always", "except_last", "never"]
PLACES = [["cuda", "cuda"], ["cpu", "cuda"], ["cuda", "cpu"]]


def model():
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 16))


def place_like(plain: nn.Sequential, devices: list[str]) -> nn.Sequential:
    """The plain module, its halves on the same devices; a copy between them is all it adds."""
    half = len(plain) // 2
    for i, layer in enumerate(plain):
        layer.to(devices[0] if i < half else devices[1])
    return plain


def run_plain(plain: nn.Sequential, x: torch.Tensor, devices: list[str]) -> torch.Tensor:
    for i, layer in enumerate(plain):
        x = layer(x.to(devices[0] if i < len(plain) // 2 else devices[1]))
    return x


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", PLACES)
def test_training(devices, checkpoint):
    torch.manual_seed(0)
    plain = model()
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=devices, chunks=4, checkpoint=checkpoint)
    place_like(plain, devices)
    for _ in range(3):
        x = torch.rand(16, 16, device=devices[0])
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = torch.cat([run_plain(plain, piece, devices) for piece in a.chunk(4)])
        actual = piped(b)
        assert actual.device.type == devices[1]
        torch.testing.assert_close(expected, actual, rtol=1e-5, atol=1e-6)
        expected.square().mean().backward()
        actual.square().mean().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
        for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        for p, q in zip(plain.buffers(), piped.buffers(), strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("devices", PLACES)
def test_dropout_is_recomputed_alike(devices):
    plain = nn.Sequential(nn.Linear(16, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout(0.3))
    x = torch.rand(16, 16, device=devices[0])
    for chunks in (1, 4):
        results = []
        for checkpoint in MODES:
            piped = GPipe(copy.deepcopy(plain), [2, 2], devices=devices, chunks=chunks, checkpoint=checkpoint)
            torch.manual_seed(1)
            outputs = [piped(x) for _ in range(2)]
            sum(output.sum() for output in outputs).backward()
            results.append((*outputs, *(p.grad for p in piped.parameters())))
        assert not torch.equal(results[0][0], results[0][1])
        for result in results[1:]:
            for first, other in zip(results[0], result, strict=True):
                torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)


def test_dropout_equals_the_plain_module_that_draws_by_the_same_keys():
    plain = nn.Sequential(nn.Linear(16, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout(0.3)).cuda()
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=["cuda", "cuda"], checkpoint="always")
    x = torch.rand(16, 16, device="cuda")
    with keyed_random(1, layers=piped.layers(plain)):
        expected = plain(x)
    with keyed_random(1):
        actual = piped(x)
    assert torch.equal(expected, actual)


def test_masks_agree_with_gradients_when_stages_share_a_device():
    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = F.dropout(x, p=0.001)
            return x

    x = torch.rand(10, 10, device="cuda", requires_grad=True)
    piped = GPipe(
        nn.Sequential(Dropouts(), Dropouts()), [1, 1], devices=["cuda"] * 2, chunks=10, checkpoint="always"
    )
    y = piped(x)
    y.norm().backward()
    assert y.bool().tolist() == x.grad.bool().tolist() and not y.bool().all()


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", [["cuda"] * 3, ["cuda", "cpu", "cuda"], ["cpu", "cuda", "cpu"]])
def test_skips_cross_devices(devices, checkpoint):
    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("skip", x * 3)
            return x

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x):
            return x + (yield pop("skip"))

    plain = nn.Sequential(Stash(), nn.Linear(8, 8), Pop())
    piped = GPipe(copy.deepcopy(plain), [1, 1, 1], devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, 8)
    a, b = x.clone().requires_grad_(), x.to(devices[0]).requires_grad_()
    expected, actual = plain(a), piped(b)
    torch.testing.assert_close(expected, actual.cpu(), rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain[1].weight.grad, piped[1].weight.grad.cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpoint", MODES)
def test_autocast(checkpoint):
    plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=["cuda"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.rand(8, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = torch.cat([plain(piece) for piece in x.chunk(2)])
        actual = piped(x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(expected, actual)
    expected.float().sum().backward()
    actual.float().sum().backward()
    for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("places", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_copy_and_wait(places):
    source, target = (new_stream(torch.device(place)) for place in places)
    with use_stream(source):
        if source is not CPUStream:
            torch.cuda._sleep(100_000_000)
        x = torch.ones(100, device=get_device(source), requires_grad=True)
    (y,) = Copy.apply(source, target, x)
    (y,) = Wait.apply(source, target, y)
    with use_stream(target):
        assert y.sum().item() == 100
        y.norm().backward()
    with use_stream(source):
        torch.testing.assert_close(x.grad.sum().item(), 10.0)


def test_streams_are_the_callers():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append(current_stream(x.device))
            return x

    stream = torch.cuda.Stream()
    piped = GPipe(nn.Sequential(See(), See()), [1, 1], devices=["cuda"] * 2, chunks=2)
    with torch.cuda.stream(stream):
        piped(torch.rand(4, device="cuda"))
    assert seen == [stream] * 4


def test_checkpointing_saves_memory():
    def peak(checkpoint):
        piped = GPipe(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(8))
            ),
            [4, 4],
            devices=["cuda"] * 2,
            chunks=8,
            checkpoint=checkpoint,
        )
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = piped(torch.rand(16384, 512, device="cuda"))
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated() - before
        output.sum().backward()
        return used

    assert peak("always") < peak("except_last") < peak("never")


def test_balance_on_cuda():
    class Expand(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = x + torch.rand_like(x, requires_grad=True)
            return x

    sample = torch.rand(10, 100, 100)
    layers = nn.Sequential(*map(Expand, (1, 2, 3, 4, 5, 6)))
    assert balance_by_size(2, layers, sample) == [4, 2]
    linears = nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(6)))
    assert balance_by_size(2, linears, torch.rand(7, 1), param_scale=100) == [4, 2]
    big = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8192), nn.Linear(8192, 8192), nn.Linear(8192, 64))
    assert balance_by_time(2, big, torch.rand(4096, 64), cache=False)[0] in (2, 3)
    assert all(p.device.type == "cpu" for p in big.parameters())
