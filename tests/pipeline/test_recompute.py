"""Modules that are computed again in the backward pass, by name, in cut models."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from pipeline_compare import one_thread  # noqa: F401
from pipeline_zoo import ZOO, ResNet, calm, make
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError
from intarsia.pipeline import keyed_random
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.program import module_names


def loss_of(output):
    return sum(t.float().square().mean() for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor))


def kept_elements(module, args, kwargs):
    """Elements that autograd keeps over a forward pass, parameters aside."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    found = {}

    def pack(tensor):
        key = tensor.untyped_storage()._cdata
        if key not in own:
            found[key] = tensor.numel()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        output = module(*args, **kwargs)
    return sum(found.values()), output


NAMES = {
    "gpt2": ["transformer.h.*"],
    "resnet": ["blocks.1", "blocks.2"],
    "llama": ["model.layers.*.mlp"],
}


@functools.cache
def cut(name):
    """A model and its stages that compute again, a copy and its stages that do not, and a call."""
    model, args, kwargs = make(name)
    calm(model).train()
    plain = copy.deepcopy(model)
    parts = split(model, args, kwargs, stages=2, by="memory", checkpoint=NAMES[name])
    return model, parts, plain, split(plain, args, kwargs, stages=2, by="memory"), args, kwargs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [None, 2])
def test_same_gradients_and_less_kept(name, chunks):
    model, parts, plain, whole, args, kwargs = cut(name)
    model.zero_grad(), plain.zero_grad()
    if chunks is not None:
        parts, whole = (p.gpipe(chunks=chunks, checkpoint="never") for p in (parts, whole))
    if chunks is None:
        less, output = kept_elements(parts, args, kwargs)
        more, want = kept_elements(whole, args, kwargs)
        assert less < more, (less, more)
    else:
        output, want = parts(*args, **kwargs), whole(*args, **kwargs)
    loss_of(output).backward()
    loss_of(want).backward()
    for (n, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), n
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=n: f"{n}: {m}")
    for (n, a), b in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b), n  # statistics were updated once


def test_dropout_draws_the_same_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    parts = split(model, (x,), stages=2, by="memory", checkpoint=["1"])
    for module in (plain, parts):
        torch.manual_seed(1)
        loss_of(module(x)).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_names_that_are_nowhere_are_refused():
    model, x = ResNet(), torch.randn(2, 3, 8, 8)
    with pytest.raises(PartitionError, match=r"checkpoint names 'blocks.7'.*did you mean 'blocks"):
        split(model, (x,), stages=2, by="memory", checkpoint=["blocks.7"])
    with pytest.raises(PartitionError, match=r"conv2 cannot be recomputed alone: \w+ is changed in place"):
        split(model, (x,), stages=2, by="memory", checkpoint=["blocks.*.conv2"])
    with pytest.raises(PartitionError, match="is one name; give a list"):
        split(model, (x,), stages=2, by="memory", checkpoint="blocks.1")
    for wrong in (True, [0]):
        with pytest.raises(PartitionError, match="is not a list of modules' names"):
            split(model, (x,), stages=2, by="memory", checkpoint=wrong)
    parts = split(model, (x,), stages=2, by="memory")
    assert "blocks.1.conv1" in set().union(*(module_names(stage.program) for stage in parts))
    assert set(NAMES) <= set(ZOO)


def test_stages_that_compute_again_are_copied_and_saved(tmp_path):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model, x = nn.Sequential(inner, nn.Linear(4, 4)), torch.randn(4, 4)
    parts = split(model, (x,), cuts=["1"], checkpoint=["0"])
    torch.save(parts, tmp_path / "parts")
    loaded = torch.load(tmp_path / "parts", weights_only=False)
    for twin in (copy.deepcopy(parts), copy.deepcopy(parts.gpipe(chunks=2)), loaded):
        kept, output = kept_elements(twin, (x,), {})
        torch.testing.assert_close(output, model(x))
        assert kept < kept_elements(model, (x,), {})[0]
        loss_of(output).backward()
        assert all(p.grad is not None for p in twin.parameters()) and model[1].weight.grad is None


class Odd(nn.Module):
    def forward(self, x):
        return x if x.sum() > 1e9 else x + 1


def test_stages_of_modules_refuse():
    model = nn.Sequential(nn.Linear(4, 4), Odd(), nn.Linear(4, 4), Odd())
    with pytest.raises(PartitionError, match="these stages are cut along modules"):
        split(model, (torch.randn(2, 4),), stages=2, by="memory", checkpoint=["0"])


def gpt2(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_embd=32,
        n_layer=4,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        **changes,
    )
    return transformers.GPT2LMHeadModel(config).train(), torch.randint(0, 40, (4, 32))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_the_model_itself(reentrant):
    """What stages keep for backward is as little as the plain model keeps."""
    plain, ids = gpt2()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    stages = split(model, (ids,), {"use_cache": False}, stages=2, by="memory")
    assert stages.report.checkpointed == tuple(f"transformer.h.{i}" for i in range(4))
    assert not stages.report.not_recomputed
    with keyed_random(0):
        least, want = kept_elements(plain, (ids,), {"use_cache": False})
        want.logits.square().mean().backward()
    with keyed_random(0):
        kept, output = kept_elements(stages, (ids,), {"use_cache": False})
        output.logits.square().mean().backward()
    assert torch.equal(output.logits, want.logits)
    whole, ids = gpt2()
    most, _ = kept_elements(
        split(whole, (ids,), {"use_cache": False}, stages=2, by="memory"), (ids,), {"use_cache": False}
    )
    assert kept < 1.5 * least and kept < most / 3, (kept, least, most)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
