"""Stages given to the engines answer as the model does."""

from __future__ import annotations

import pytest
import torch
from pipeline_zoo import make, rotary
from test_tree import Moody
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline.split import split

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", ["mlp", "unet", pytest.param("llama", marks=pytest.mark.full)])
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


@pytest.mark.slow
def test_the_length_of_a_sequence_and_the_last_micro_batch_may_vary():
    torch.manual_seed(0)
    model, args, kwargs = rotary("Llama", layers=2)()
    model.eval()
    shapes = {"input_ids": {0: Dim("batch", min=2), 1: Dim("length", min=2, max=64)}, "use_cache": None}
    parts = split(model, args, kwargs, stages=2, by="memory", dynamic_shapes=shapes)
    fast = parts.compile(args, kwargs, engines=["onnxruntime"])
    pipe = fast.gpipe(chunks=2)
    with torch.no_grad():
        for size in ((4, 12), (2, 7), (5, 3)):
            tokens = torch.randint(0, 64, size)
            want = model(tokens, use_cache=False).logits
            torch.testing.assert_close(fast(tokens, use_cache=False).logits, want, rtol=1e-4, atol=1e-4)
            if size[0] > 2:  # of five samples the last micro-batch has two
                torch.testing.assert_close(pipe(tokens, use_cache=False).logits, want, rtol=1e-4, atol=1e-4)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moody = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), Moody(6)
        self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.last(self.moody(self.first(x)))


def test_stages_of_modules_keep_the_batch_open():
    model, x = Decides().eval(), torch.randn(4, 6)
    parts = split(model, (x,), cuts=["moody", "last"], by="memory")
    assert parts.report.way == "modules"
    fast = parts.compile((x,), engines=["onnxruntime"])
    with torch.no_grad():
        for batch in (x, -x, torch.randn(7, 6), torch.randn(2, 6)):
            torch.testing.assert_close(fast(batch), model(batch), rtol=1e-4, atol=1e-5)
