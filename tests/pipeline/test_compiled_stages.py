"""Stages given to the engines answer as the model does."""

from __future__ import annotations

import pytest
import torch
from pipeline_zoo import make
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", ["mlp", "llama", "unet"])
def test_compiled_stages_equal_the_model(name):
    model, args, kwargs = make(name)
    model.eval()
    fast = split(model, args, kwargs, stages=2, by="memory").compile(args, kwargs, engines=["onnxruntime"])
    assert all(stage.program.plan for stage in fast)
    with torch.no_grad():
        got, want = fast(*args, **kwargs), model(*args, **kwargs)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_micro_batches_flow_through_compiled_stages():
    model, (x,), _ = make("mlp")
    model.eval()
    parts = split(model, (x,), stages=2, by="memory")
    pipe = parts.compile((x[:2],), engines=["onnxruntime"]).gpipe(chunks=2)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-4, atol=1e-5)


def test_training_stages_are_refused():
    model, args, kwargs = make("mlp")
    with pytest.raises(PartitionError, match=r"after model\.eval\(\)"):
        split(model, args, kwargs, stages=2, by="memory").compile(args, kwargs)


def test_another_length_than_compiled_for_is_refused():
    model, (x,), _ = make("mlp")
    model.eval()
    fast = split(model, (x,), stages=2, by="memory").compile((x,), engines=["onnxruntime"])
    with pytest.raises(InputError):
        fast(x[:1])
    fixed = split(model, (x,), stages=2, by="memory", dynamic_batch=False)
    with pytest.raises(InputError):
        fixed.compile((x,), engines=["onnxruntime"])(x[:2])


def test_the_batch_stays_open():
    model, (x,), _ = make("mlp")
    model.eval()
    fast = split(model, (x,), stages=2, by="memory").compile((x,), engines=["onnxruntime"])
    for batch in (x[:2], torch.randn(7, 8)):
        with torch.no_grad():
            torch.testing.assert_close(fast(batch), model(batch), rtol=1e-4, atol=1e-5)
