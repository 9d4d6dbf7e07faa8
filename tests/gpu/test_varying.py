"""Sizes that vary, and masks with padding, on a CUDA device: a graph for each size, eager's answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2}
    return BertModel(BertConfig(vocab_size=128, **sizes)).eval().cuda().half()


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 128, (rows, length), device="cuda")
    ends = torch.randint(1, length + 1, (rows, 1), device="cuda")
    return ids, (torch.arange(length, device="cuda") < ends).long()


def test_padded_batches_of_any_length_are_one_graph_each() -> None:
    model, args = bert(), batch(3, 20)
    dims = {1: Dim("length", min=2, max=64)}
    fast = intarsia.compile(
        model, args, dynamic_shapes={"input_ids": dims, "attention_mask": dims}, engines=["inductor"]
    )
    assert fast.notes == ()
    assert fast.plan.engines == ("inductor",)
    for length in (20, 7, 33, 7, 64, 2, 33):
        ids, mask = batch(3, length)
        with torch.no_grad():
            torch.testing.assert_close(fast(ids, mask)[0], model(ids, mask)[0], atol=2e-2, rtol=2e-2)


def test_a_batch_of_one_is_answered_where_it_may_be_one() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval().cuda()
    x = torch.randn(4, 8, device="cuda")
    fast = intarsia.compile(
        model, (x,), dynamic_shapes=({0: Dim("rows", min=1, max=8)},), engines=["inductor"]
    )
    for rows in (1, 2, 8, 1):
        x = torch.randn(rows, 8, device="cuda")
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


def test_random_numbers_work_after_a_recording_that_failed() -> None:
    from intarsia.runtime.cuda_graphs import captured

    x, stream = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with pytest.raises(RuntimeError):
        captured(lambda: x.sum().item(), stream, torch.cuda.graph_pool_handle())
    assert torch.randn(2, device="cuda").isfinite().all()
