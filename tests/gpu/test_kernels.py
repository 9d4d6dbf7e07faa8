"""Our kernels on a CUDA device against PyTorch; sizes that vary there, and torch.compile beside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.engines.triton_kernels import operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drawn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, device="cuda", dtype=dtype, generator=generator)


def heads(rows: int, length: int, count: int, size: int, seed: int) -> torch.Tensor:
    return drawn(rows, length, count, size, seed=seed).transpose(1, 2)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("length", [3, 64, 130])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("kind", ["padding", "booleans", "numbers", "transposed", "one"])
def test_masked_attention(length: int, size: int, kind: str) -> None:
    query, key, value = (heads(2, length, n, size, seed) for seed, n in enumerate((8, 2, 2)))
    mask = drawn(2, 8, length, length) if kind == "numbers" else drawn(2, 1, length, length) > 0
    if kind == "padding":
        mask = torch.arange(length, device="cuda").expand(2, 1, 1, length) < 2
    if kind == "transposed":
        mask = (drawn(2, 8, length, length) > 0).transpose(2, 3)
    if kind == "one":
        mask = torch.ones(2, 1, 1, 1, dtype=torch.bool, device="cuda")
    wide = mask.float() if kind == "numbers" else mask
    expected = nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), wide, scale=0.2, enable_gqa=True
    )
    assert off(operators.masked_attention(query, key, value, mask, 0.2), expected) < 1e-2


@pytest.mark.parametrize("length", [3, 64, 130, 300])
@pytest.mark.parametrize("kind", ["padding", "booleans", "numbers"])
def test_causal_attention_with_padding(length: int, kind: str) -> None:
    query, key, value = (heads(2, length, n, 64, seed) for seed, n in enumerate((8, 2, 2)))
    mask = torch.arange(length, device="cuda").expand(2, 1, 1, length) != 1
    if kind != "padding":
        mask = (drawn(2, 1, length, length) > 0) | torch.eye(length, dtype=torch.bool, device="cuda")
    if kind == "numbers":
        mask = torch.where(mask, drawn(2, 8, length, length), -torch.inf)
    operands = (query, key, value, mask)
    wide = [x.float().cpu() if x.is_floating_point() else x.cpu() for x in operands]
    expected = operators.masked_attention(*wide, 0.2, True)
    assert off(operators.masked_attention(*operands, 0.2, True).cpu(), expected) < 1e-2


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("room", [16, 264])
def test_token_attention(groups: int, room: int) -> None:
    past = drawn(2, 3, 2, room, 64)
    query, key, value = (heads(3, 1, n, 64, seed) for seed, n in enumerate((2 * groups, 2, 2)))
    mask = torch.zeros(3, 1, 1, room + 1, dtype=torch.bool, device="cuda")
    mask[..., 2:11], mask[..., -1] = True, True
    mask[1, ..., :7] = False
    operands = (query, past[0], past[1], key, value, mask, 0.125)
    wide = [x.float() if x.is_floating_point() else x for x in operands[:-1]]
    expected = operators.token_attention(*(x.cpu() for x in wide), 0.125)
    assert off(operators.token_attention(*operands).cpu(), expected) < 1e-2


@pytest.mark.parametrize(
    ("inner", "outputs"), [(64, 96), (1024, 1536), (4096, 1024), (1000, 7), (11008, 512)]
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_row_product(inner: int, outputs: int, gated: bool, around: bool) -> None:
    x, weight = drawn(1, 1, inner), drawn(outputs * (1 + gated), inner, seed=1) * 0.02
    bias = drawn(outputs * (1 + gated), seed=2) if around else None
    norm, residual = (drawn(inner, seed=3), drawn(1, 1, outputs, seed=4)) if around else (None, None)
    operands = (x, weight, bias, norm, residual)
    found = operators.row_product(*operands, 1e-5, gated)
    wide = [None if y is None else y.cpu().float() for y in operands]
    assert off(found.cpu(), operators.row_product(*wide, 1e-5, gated)) < 1e-2


@pytest.mark.parametrize("vocabulary", [100, 32000, 128256])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (20, 0.3), (50, 1.0), (1, 0.9), (200, 0.9)])
def test_tokens_are_drawn_as_transformers_draws_them(vocabulary: int, top_k: int, top_p: float) -> None:
    from transformers.generation import logits_process

    from intarsia.engines.triton_kernels.sampling import drawn_tokens

    logits = drawn(7, vocabulary, dtype=torch.float32) * 3
    torch.manual_seed(0)
    tokens = drawn_tokens(logits, top_k, top_p)
    kept = logits_process.TopKLogitsWarper(top_k)(None, logits)
    shares = (logits_process.TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept).softmax(-1)
    torch.manual_seed(0)
    assert torch.equal(tokens, (shares / torch.empty_like(shares).exponential_(1)).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_that_end_in_padding_are_copied(dtype: torch.dtype) -> None:
    from intarsia.engines.triton_kernels.copies import copy_rows, has_padded_rows

    wide = drawn(3, 40, 50264, dtype=dtype)
    x = wide[..., :50257]
    assert has_padded_rows(x)
    assert not has_padded_rows(wide[:, ::2, :50257].transpose(0, 1))
    assert not has_padded_rows(wide)
    to = torch.empty(x.shape, device="cuda", dtype=dtype)
    copy_rows(to, x)
    assert torch.equal(to, x)


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    query, key, value = (heads(2, 70, 4, 64, seed) for seed in range(3))
    mask = drawn(2, 1, 70, 70) > 0
    mask[0, 0, 3] = False
    attended = operators.masked_attention(query, key, value, mask, 0.2)
    assert attended.isfinite().all() and not attended[0, :, 3].any()


def test_logits_that_equal_the_last_one_are_all_drawn() -> None:
    from intarsia.engines.triton_kernels.sampling import drawn_tokens

    logits = torch.zeros(400, 10, device="cuda")
    assert set(drawn_tokens(logits, 3, 1.0).tolist()) == set(range(10))


# Sizes that vary, and masks with padding, on a CUDA device: a graph for each size, eager's answers.


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


# A compiled module and one of torch.compile in one process, both run by CUDA graphs.


def test_torch_compile_records_graphs_beside_ours() -> None:
    """It gives the working memory of products back while it records, for all streams."""
    model = nn.Linear(4096, 64).half().eval().cuda()  # long sums of few results: summed in working memory
    x = torch.randn(8, 4096, device="cuda", dtype=torch.float16)
    fast = intarsia.compile(model, (x,), engines=["pytorch"])
    other = torch.compile(nn.Linear(64, 64).eval().cuda(), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            other(torch.randn(4, 64, device="cuda"))
        torch.cuda.empty_cache()
        taken = torch.zeros(2**26, device="cuda")  # what was given back is somebody else's
        torch.testing.assert_close(fast(x), model(x))
    assert not taken.any()
