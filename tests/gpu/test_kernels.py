"""Our kernels on a CUDA device against PyTorch in float32, at lengths that fill no block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("vocabulary", [100, 32000])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (20, 0.3), (50, 1.0), (1, 0.9)])
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
