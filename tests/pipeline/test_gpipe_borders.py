"""What passes between stages: trees, numbers, None, uneven micro-batches; and what autograd asks of them."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from pipeline_compare import MODES, one_thread, threads_end  # noqa: F401  (a fixture)
from torch import nn

from intarsia.pipeline import GPipe


class Fork(nn.Module):
    def forward(self, x):
        return {
            "x": x * 2,
            "count": 3,
            "none": None,
            "nested": [x.long(), (x,)],
            "flag": True,
            "name": "kept",
        }


class Change(nn.Module):
    def forward(self, tree):
        assert tree["none"] is None and tree["flag"] is True and tree["name"] == "kept"
        return {**tree, "x": tree["x"] * tree["count"], "count": tree["count"] + 1}


class Merge(nn.Module):
    def forward(self, tree):
        return tree["x"] * tree["count"] + tree["nested"][1][0] + tree["nested"][0]


@pytest.mark.parametrize("checkpoint", MODES)
def test_trees_numbers_and_none_pass_borders(checkpoint):
    plain = nn.Sequential(Fork(), Change(), Merge())
    piped = GPipe(plain, [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    x = torch.linspace(-3, 3, 10).requires_grad_()
    expected = plain(x)
    actual = piped(x)
    assert torch.equal(expected, actual)
    assert torch.equal(
        torch.autograd.grad(expected.sum(), x)[0],
        torch.autograd.grad(actual.sum(), x)[0],
    )


def test_trees_as_input_and_output():
    class Swap(nn.Module):
        def forward(self, tree):
            return {"b": [tree["a"][0] + tree["n"], None], "a": tree["a"][1], "n": tree["n"], "s": tree["s"]}

    class Back(nn.Module):
        def forward(self, tree):
            return {"a": (tree["b"][0], tree["a"]), "n": tree["n"], "s": tree["b"][1]}

    tree = {"a": (torch.rand(5, 2), torch.arange(5)), "n": 2, "s": None}
    output = GPipe(nn.Sequential(Swap(), Back()), [1, 1], devices=["cpu"] * 2, chunks=2)(tree)
    assert torch.equal(output["a"][0], tree["a"][0] + 2) and torch.equal(output["a"][1], tree["a"][1])
    assert output["n"] == 2 and output["s"] is None


@pytest.mark.parametrize("checkpoint", MODES)
def test_integers_first_and_tensors_twice(checkpoint):
    class Pair(nn.Module):
        def forward(self, x):
            return (x.detach().long(), x, x, torch.tensor([False]))

    class Sum(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1] * pair[2]

    piped = GPipe(nn.Sequential(Pair(), Sum()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x = torch.linspace(1, 4, 4).requires_grad_()
    y = piped(x)
    y.sum().backward()
    assert torch.equal(y, x.long() + x * x)
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize(("batch", "chunks", "expected"), [(7, 4, [2, 2, 2, 1]), (2, 5, [1, 1]), (5, 1, [5])])
def test_uneven_and_fewer_chunks(batch, chunks, expected):
    sizes = []

    class Size(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return x

    piped = GPipe(nn.Sequential(Size(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=chunks)
    x = torch.rand(batch, 1)
    assert torch.equal(piped(x), x)
    assert sizes == expected


def test_python_autograd_functions():
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class M(nn.Module):
        def forward(self, x):
            return Identity.apply(x)

    x = torch.rand(42)
    for chunks in (1, 2):
        piped = GPipe(
            nn.Sequential(M(), M()), [1, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint="always"
        )
        assert torch.equal(piped(x), x)


def test_double_backward_without_checkpointing():
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    piped = GPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    results = []
    for model in (plain, piped):
        x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_backward_twice():
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    y = piped(torch.ones(2, 1)).sum()
    y.backward(retain_graph=True)
    once = piped[0].weight.grad.clone()
    y.backward()
    assert torch.equal(piped[0].weight.grad, 2 * once)


def test_threads_end():
    before = threading.active_count()
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(5):
        piped(torch.rand(2, 1)).sum().backward()
    assert threading.active_count() <= before + 2  # a stage keeps its thread
    del piped
    assert threads_end(before)
