"""Models that cannot be exported are cut between their modules, and the reason is told."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from intarsia.errors import CaptureError, InputError, PartitionError
from intarsia.pipeline.split import split


class Moody(nn.Module):
    """Decides by its data: no graph holds it."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x) if float(x.detach().sum()) > 0 else self.b(x)


class Deep(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([nn.Sequential(Moody(width), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(width, 2)
        self.spare = nn.Linear(1, 1)

    def forward(self, x, scale=1.0):
        x = skip = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"y": self.last(x + skip) * scale, "skip": skip}


@pytest.mark.parametrize("by", ["time", "memory"])
def test_cut_between_modules(by):
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(4, 6)
    whole = copy.deepcopy(model)
    parts = split(model, (x,), stages=3, by=by)
    assert parts.report.way == "modules"
    assert "Could not" in parts.report.reason or "data" in parts.report.reason.lower(), parts.report.reason
    assert len(parts) == 3
    for batch in (x, -x, torch.randn(9, 6)):
        model.zero_grad(), whole.zero_grad()
        got, want = parts(batch), whole(batch)
        assert torch.equal(got["y"], want["y"]) and torch.equal(got["skip"], want["skip"])
        (got["y"].sum() + got["skip"].sum()).backward()
        (want["y"].sum() + want["skip"].sum()).backward()
        for (n, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), n
            assert p.grad is None or torch.equal(p.grad, q.grad), n
    assert list(parts.state_dict()) == list(model.state_dict())
    assert all(p is q for p, q in zip(parts.parameters(), model.parameters(), strict=True))


def test_modes_and_shapes_are_checked():
    model, x = Deep(), torch.randn(4, 6)
    parts = split(model, (x,), stages=2, by="memory")
    with pytest.raises(InputError, match="shape"):
        parts(torch.randn(4, 7))
    parts.eval()
    with pytest.raises(InputError, match="other mode"):
        parts(x)


def test_pipelined_in_one_process():
    model, x = Deep(), torch.randn(6, 6).abs()
    pipe = split(model, (x,), stages=2, by="memory").gpipe(chunks=2)
    got = [pipe(x)["y"], torch.cat([model(h)["y"] for h in x.chunk(2)])]
    torch.testing.assert_close(*got)


def test_neither_way_is_possible():
    class Whole(nn.Module):
        def forward(self, x):
            return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(CaptureError, match=r"neither by its graph .* nor by its modules"):
        split(Whole(), (torch.randn(3),), stages=2)


def test_frozen_tensors_are_refused():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = Moody(3)

        def forward(self, x):
            return self.m(x) + torch.rand(3)

    with pytest.raises(CaptureError, match="tracing would freeze"):
        split(Noisy(), (torch.randn(2, 3),), stages=2)


def test_too_few_modules():
    with pytest.raises(PartitionError, match="needs 4 cuts"):
        split(nn.Sequential(Moody(2), Moody(2)), (torch.randn(2, 2),), stages=5)
