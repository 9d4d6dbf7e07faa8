"""Micro-batches: the batch itself, scattering and gathering."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.pipeline.gpipe.microbatch import Batch, gather, scatter

a, b = torch.tensor(42), torch.tensor(21)


def test_atomic_batch():
    batch = Batch(a)
    assert batch.atomic and batch.tensor is a and batch.value is a
    assert list(batch) == [a] and len(batch) == 1 and batch[0] is a
    with pytest.raises(AttributeError):
        _ = batch.tensors


def test_batch_of_a_tuple():
    batch = Batch((a, b))
    assert not batch.atomic and batch.tensors == (a, b) and batch.value == (a, b)
    assert list(batch) == [a, b] and len(batch) == 2 and batch[1] is b
    with pytest.raises(AttributeError):
        _ = batch.tensor


def test_batch_of_a_tree_holds_its_tensors():
    batch = Batch({"a": a, "n": 3, "list": [None, b]})
    assert list(batch) == [a, b]
    batch[1] = a
    assert batch.value == {"a": a, "n": 3, "list": [None, a]}


def test_call():
    assert Batch(a).call(lambda x: x).atomic
    assert not Batch((a, b)).call(lambda x: x).atomic


def test_replacing_tensors():
    one, two = Batch(a), Batch((a, b))
    one[0] = two[0] = torch.tensor(0)
    assert one.atomic and one[0].item() == 0
    assert not two.atomic and [x.item() for x in two] == [0, 21]
    one[:] = two[:] = (torch.tensor(7),)
    assert one.atomic and one.tensor.item() == 7
    assert not two.atomic and len(two) == 1
    with pytest.raises(ValueError):
        one[:] = (a, b)
    with pytest.raises(TypeError):
        one[0] = "hello"
    assert one.tensor.item() == 7, "a refused change changes nothing"


def test_scatter_tuple_in_proportion():
    first, second = scatter((torch.zeros(2, 1), torch.zeros(4, 2)), chunks=2)
    assert [tuple(x.shape) for x in first] == [tuple(x.shape) for x in second] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("sizes", "chunks"), [((4, 3), 2), ((1, 4), 2), ((7, 8), 4)])
def test_scatter_refuses_what_would_not_pair(sizes, chunks):
    with pytest.raises(ValueError, match="alike"):
        scatter(tuple(torch.zeros(size) for size in sizes), chunks)


def test_sizes_count_whatever_the_chunks():
    for chunks in (1, 2):
        batches = scatter(torch.arange(4), chunks, sizes=[3, 1])
        assert [len(batch.tensor) for batch in batches] == [3, 1]
    with pytest.raises(RuntimeError, match="sum exactly to 4"):
        scatter(torch.arange(4), 1, sizes=[1, 1])


def test_scatter_repeats_what_has_no_batch():
    batches = scatter({"x": torch.arange(3), "scale": torch.tensor(2.0), "n": 5}, chunks=3)
    assert [batch.value["x"].tolist() for batch in batches] == [[0], [1], [2]]
    assert all(batch.value["n"] == 5 and batch.value["scale"] == 2 for batch in batches)


@given(size=st.integers(0, 20), chunks=st.integers(1, 25))
@settings(deadline=None, max_examples=60)
def test_scatter_and_gather_are_inverse(size, chunks):
    x = torch.arange(size * 2.0).view(size, 2)
    batches = scatter({"x": x, "y": (x[:, 0], 3)}, chunks)
    assert 1 <= len(batches) <= max(chunks, 1)
    lengths = [len(batch[0]) for batch in batches]
    assert all(length == lengths[0] for length in lengths[:-1]) and lengths[-1] <= lengths[0]
    again = gather(batches)
    assert torch.equal(again["x"], x) and torch.equal(again["y"][0], x[:, 0]) and again["y"][1] == 3


def test_gather_refuses_disagreement():
    with pytest.raises(TypeError, match="structures"):
        gather([Batch((a[None],)), Batch([a[None]])])
    with pytest.raises(TypeError, match="disagree"):
        gather([Batch((a[None], 1)), Batch((a[None], 2))])
    with pytest.raises(ValueError, match="without dimensions"):
        gather([Batch(a), Batch(a)])
