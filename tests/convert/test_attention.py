"""Attention reaches the network as one layer and answers as torch does: masks, causality, shared heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.programs import assert_equal, kinds
from tests.processors import ROUNDS
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention as attention


def _qkv(*sizes: int, keys: int = 7, width: int = 8, out: int | None = None) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    lead = sizes[:-1]
    return (
        torch.randn(*lead, sizes[-1], width),
        torch.randn(*lead, keys, width),
        torch.randn(*lead, keys, out or width),
    )


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (1, 4, 5, 7), (5, 7), (1, 7), (4, 5, 7), (2, 4, 5, 1)]
)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_every_shape(shape: tuple[int, ...], boolean: bool) -> None:
    mask = torch.randn(shape)
    given = mask > -0.5 if boolean else mask
    net = assert_equal(lambda q, k, v, m: attention(q, k, v, m), (*_qkv(2, 4, 5), given))
    assert kinds(net).count("Attention") == 1


@pytest.mark.parametrize("queries", [5, 7, 9])
def test_causal_from_the_upper_left(queries: int) -> None:
    net = assert_equal(lambda q, k, v: attention(q, k, v, is_causal=True), _qkv(2, 4, queries))
    assert kinds(net) == ["Attention"]


@pytest.mark.parametrize("scale", [0.3, 2.0, -0.5, 0.0])
def test_scales(scale: float) -> None:
    assert_equal(lambda q, k, v: attention(q, k, v, scale=scale), _qkv(2, 4, 5, out=6))


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_rows_masked_out_altogether(hidden: float) -> None:
    mask = torch.zeros(2, 1, 5, 7)
    mask[0, :, 1] = hidden
    mask[1, :, 2, 3:] = hidden
    calls = (*_qkv(2, 4, 5), mask)
    assert_equal(lambda q, k, v, m: attention(q, k, v, m), calls)
    assert_equal(lambda q, k, v, m: attention(q, k, v, m == 0), calls)


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_heads(shared: int) -> None:
    q, k, v = _qkv(2, 4, 5)
    mask = torch.randn(2, 1, 5, 7)

    def grouped(q: Any, k: Any, v: Any, m: Any) -> Any:
        return attention(q, k, v, m, enable_gqa=True)

    net = assert_equal(grouped, (q, k[:, :shared], v[:, :shared], mask))
    assert kinds(net).count("Attention") == 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
def test_other_numbers_of_dimensions(lead: tuple[int, ...]) -> None:
    assert_equal(lambda q, k, v: attention(q, k, v), _qkv(*lead, 5))


def test_broadcast_batch() -> None:
    q, k, v = _qkv(2, 4, 5)
    assert_equal(lambda q, k, v: attention(q, k, v), (q[:1], k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats(dtype: torch.dtype) -> None:
    calls = tuple(x.to(dtype) for x in _qkv(2, 4, 5))
    tolerance = 2 * torch.finfo(dtype).eps
    for engine in drivers.ENGINES:
        if engine == "onnxruntime" or dtype != torch.bfloat16 or ROUNDS:  # else OpenVINO is given none
            assert_equal(
                lambda q, k, v: attention(q, k, v), calls, engines=[engine], rtol=tolerance, atol=tolerance
            )


def test_sizes_known_only_at_run_time() -> None:
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=256)
    both = {0: batch, 2: length}

    def call(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool)
        mask[..., length - 1] = False
        return (*_qkv(batch, 4, length, keys=length), mask)

    net = assert_equal(
        lambda q, k, v, m: attention(q, k, v, m),
        call(2, 5),
        call(3, 9),
        call(1, 17),
        dynamic=(both, both, both, {0: batch, 3: length}),
    )
    assert kinds(net).count("Attention") == 1
