"""Deferred batch norm: running statistics of the mini-batch."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.pipeline.gpipe.batchnorm import DeferredBatchNorm

convert = DeferredBatchNorm.convert_deferred_batch_norm


def tilted(*shape: int) -> torch.Tensor:
    """Every channel has another spread, every sample another mean."""
    x = torch.rand(*shape)
    x = x * torch.tensor([1.0, 10.0, 100.0]).view(1, 3, *[1] * (len(shape) - 2))
    return x + 2.0 ** torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))


def chunked(module: nn.Module, x: torch.Tensor, chunks: int) -> torch.Tensor:
    return torch.cat([module(piece) for piece in x.chunk(chunks)])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [1, 4])
def test_running_statistics(chunks, momentum):
    bn = nn.BatchNorm2d(3, momentum=momentum)
    deferred = convert(deepcopy(bn), chunks=chunks)
    for _ in range(3):
        x = tilted(16, 3, 8, 8)
        bn(x)
        chunked(deferred, x, chunks)
    torch.testing.assert_close(bn.state_dict(), deferred.state_dict())
    bn.eval(), deferred.eval()
    torch.testing.assert_close(bn(x), deferred(x))


@pytest.mark.parametrize("chunks", [1, 4])
def test_each_micro_batch_is_normalised_as_before(chunks):
    bn = nn.BatchNorm2d(3)
    deferred = convert(deepcopy(bn), chunks=chunks)
    x = tilted(16, 3, 8, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    first, second = chunked(bn, a, chunks), chunked(deferred, b, chunks)
    torch.testing.assert_close(first, second)
    first.square().mean().backward()
    second.square().mean().backward()
    torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(bn.weight.grad, deferred.weight.grad)
    assert not deferred.sum.requires_grad and deferred.sum.grad_fn is None


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("batch", "chunks"), [(8, 4), (7, 4), (2, 4), (5, 1), (3, 8)])
def test_committed_whatever_the_chunk_count(batch, chunks, checkpoint):
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    plain[2] = nn.Identity()
    model = GPipe(
        deepcopy(plain),
        [1, 2],
        devices=["cpu"] * 2,
        chunks=chunks,
        checkpoint=checkpoint,
        deferred_batch_norm=True,
    )
    for _ in range(2):
        x = torch.rand(batch, 3, 4, 4)
        plain(x)
        model(x).mean().backward()
    torch.testing.assert_close(plain.state_dict(), dict(model.plain_state_dict()))
    assert model[1].weight.grad is not None


def test_an_interrupted_mini_batch_leaves_nothing():
    class Fail(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail:
                raise ZeroDivisionError
            return x

    bn = nn.BatchNorm1d(3)
    model = GPipe(
        nn.Sequential(deepcopy(bn), Fail()), [1, 1], devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True
    )
    x = tilted(8, 3)
    with pytest.raises(ZeroDivisionError):
        model(x + 1000)
    model[1].fail = False
    model(x)
    bn(x)
    torch.testing.assert_close(
        dict(model.plain_state_dict()), {f"0.{k}": v for k, v in bn.state_dict().items()}
    )


@given(
    mean=st.floats(-1e4, 1e4),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_statistics_do_not_cancel(mean, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(2 * size, 3, generator=generator) + mean for size in sizes]
    whole = torch.cat(pieces).double()
    deferred = DeferredBatchNorm(3, momentum=None, chunks=len(pieces))
    for piece in pieces:
        deferred(piece)
    torch.testing.assert_close(deferred.running_mean.double(), whole.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(deferred.running_var.double(), whole.var(0), rtol=2e-3, atol=1e-5)


def test_conversion():
    assert type(convert(nn.BatchNorm2d(3, track_running_stats=False), chunks=4)) is nn.BatchNorm2d
    deferred = DeferredBatchNorm(3, chunks=4)
    assert convert(deferred, chunks=4) is deferred
    assert convert(deferred, chunks=5) is not deferred
    shared = nn.BatchNorm1d(2)
    outer = nn.Sequential(nn.Sequential(shared), nn.ModuleDict({"a": shared})).eval()
    converted = convert(outer, chunks=2)
    assert isinstance(converted[0][0], DeferredBatchNorm) and converted[0][0] is converted[1]["a"]
    assert converted[0][0].weight is shared.weight and not converted[0][0].training
    with pytest.raises(ValueError, match="dimension"):
        deferred(torch.rand(3))
