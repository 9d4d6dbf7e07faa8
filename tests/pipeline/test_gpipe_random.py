"""Random pipelines equal the plain module, whatever the cuts, chunks and checkpoints."""

from __future__ import annotations

import copy
import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from intarsia.pipeline import GPipe, pop, skippable, stash
from intarsia.pipeline.gpipe.skip import Namespace


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x.sin())
        return x * 1  # what comes next may change it in place, and sin needs it


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


class Pair(nn.Module):
    """Makes a tree of what it gets, or one tensor of the tree it gets."""

    def forward(self, x):
        return {"x": x, "more": (x * 2, 3, None)}


class Unpair(nn.Module):
    def forward(self, tree):
        return tree["x"] + tree["more"][0] * tree["more"][1]


LAYERS = {
    "linear": lambda: [nn.Linear(4, 4)],
    "inplace": lambda: [nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "norm": lambda: [nn.BatchNorm1d(4)],
    "tree": lambda: [Pair(), Unpair()],
}


@st.composite
def pipelines(draw):
    layers = [
        layer
        for name in draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=5))
        for layer in LAYERS[name]()
    ]
    flat = [i for i in range(len(layers) + 1) if i == 0 or not isinstance(layers[i - 1], Pair)]
    for _ in range(draw(st.integers(0, 2))):
        ns = Namespace()
        a, b = sorted((draw(st.sampled_from(flat)), draw(st.sampled_from(flat))))
        layers[b:b] = [Pop().isolate(ns)]
        layers[a:a] = [Stash().isolate(ns)]
        flat = [i for i in range(len(layers) + 1) if i == 0 or not isinstance(layers[i - 1], Pair)]
    stages = draw(st.integers(1, min(4, len(layers))))
    inner = draw(st.permutations(range(1, len(layers))))[: stages - 1]
    cuts = [0, *sorted(inner), len(layers)]
    return nn.Sequential(*layers), [b - a for a, b in itertools.pairwise(cuts)]


@pytest.fixture(scope="module", autouse=True)
def busy_threads():
    """Threads take turns far more often than usual, and one core each keeps sums exact."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)


@given(
    pipeline=pipelines(),
    chunks=st.integers(1, 5),
    samples=st.integers(1, 5),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    concurrent=st.sampled_from([None, True, False]),
    needs_grad=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=80)
def test_random_pipelines(pipeline, chunks, samples, checkpoint, concurrent, needs_grad, seed):
    torch.manual_seed(seed)
    plain, balance = pipeline
    piped = GPipe(
        copy.deepcopy(plain),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=checkpoint,
        concurrent_backward=concurrent,
    )
    for _ in range(2):
        x = torch.randn(2 * samples * chunks, 4)  # every micro-batch has two samples, as a batch norm needs
        a, b = x.clone().requires_grad_(needs_grad), x.clone().requires_grad_(needs_grad)
        expected, actual = torch.cat([plain(p.clone()) for p in a.chunk(chunks)]), piped(b)
        assert torch.equal(expected, actual)
        if not expected.requires_grad:
            continue
        expected.square().mean().backward()
        actual.square().mean().backward()
        if needs_grad:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)
        for p, q in zip(plain.buffers(), piped.buffers(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("seed", range(12))
def test_a_running_mean_that_first_stays_put(seed):
    # The mean of two samples is often exactly zero, so that nothing seems to change at first.
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Tanh(), nn.BatchNorm1d(4))
    piped = GPipe(copy.deepcopy(plain), [4], devices=["cpu"], chunks=1, checkpoint="always")
    for _ in range(3):
        x = torch.randn(2, 4)
        plain(x.clone()).square().mean().backward()
        piped(x.clone()).square().mean().backward()
        for p, q in zip(plain.buffers(), piped.buffers(), strict=True):
            assert torch.equal(p, q)
