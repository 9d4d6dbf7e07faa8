"""Quantised tensors: what pt2e writes runs on engines and equals eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.programs import program_of
from torch import fx

from intarsia.convert import convert
from intarsia.convert.aten.quantize import HAS_QUANTIZED
from intarsia.convert.interpreter import NodeError

pytestmark = pytest.mark.skipif(not HAS_QUANTIZED, reason="this torch has no quantized_decomposed operators")
X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)) * 3
SCALES = torch.tensor([0.031, 0.0172, 0.113])
ZEROS = torch.tensor([3, -7, 0])


def check(function: Any, *inputs: torch.Tensor) -> None:
    module = program_of(function, *inputs)
    for engine in drivers.ENGINES:
        (result,) = drivers.build(engine, convert(module))(*inputs)
        torch.testing.assert_close(result, function(*inputs))  # integers exactly, floats to the last bit


@pytest.mark.parametrize(
    ("dtype", "low", "high", "zero"),
    [(torch.int8, -128, 127, 5), (torch.int8, -127, 127, 0), (torch.uint8, 0, 255, 120)],
)
def test_per_tensor_round_trip(dtype: torch.dtype, low: int, high: int, zero: int) -> None:
    q = torch.ops.quantized_decomposed
    check(lambda x: q.quantize_per_tensor(x, 0.0217, zero, low, high, dtype), X)
    integers = q.quantize_per_tensor(X, 0.0217, zero, low, high, dtype)
    check(lambda i: q.dequantize_per_tensor(i, 0.0217, zero, low, high, dtype), integers)


@pytest.mark.parametrize("scale", [0.0217, 0.1, 0.3, 1 / 3, 0.007812501])
def test_halves_fall_as_in_torch(scale: float) -> None:
    q = torch.ops.quantized_decomposed
    halves = ((torch.arange(-140, 140) + 0.5).double() * scale).float()
    near = [halves]
    for _ in range(3):
        near += [torch.nextafter(near[-1], torch.tensor(9e9))]
        near = [torch.nextafter(near[0], torch.tensor(-9e9)), *near]
    x = torch.stack(near)
    check(lambda x: q.quantize_per_tensor(x, scale, 3, -128, 127, torch.int8), x)
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, scale, 3, -128, 127), x)
    scales = torch.full((280,), scale)
    zeros = torch.arange(280) % 7
    check(lambda x: q.quantize_per_channel(x, scales, zeros, 1, -128, 127, torch.int8), x)


def test_scale_as_tensor() -> None:
    q = torch.ops.quantized_decomposed
    scale, zero = torch.tensor(0.0217), torch.tensor(5)
    check(lambda x: q.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8), X)


def test_per_channel_round_trip() -> None:
    q = torch.ops.quantized_decomposed
    check(lambda x: q.quantize_per_channel(x, SCALES, ZEROS, 1, -128, 127, torch.int8), X)
    integers = q.quantize_per_channel(X, SCALES, ZEROS, 1, -128, 127, torch.int8)
    check(lambda i: q.dequantize_per_channel(i, SCALES, ZEROS, 1, -128, 127, torch.int8), integers)


@pytest.mark.parametrize("zero", [200, -300, 127])
def test_a_zero_point_may_be_any_number(zero: int) -> None:
    q = torch.ops.quantized_decomposed
    integers = q.quantize_per_tensor(X, 0.0217, 5, -128, 127, torch.int8)
    check(lambda i: q.dequantize_per_tensor(i, 0.0217, zero, -128, 127, torch.int8), integers)
    scale, told = torch.tensor(0.0217), torch.tensor(zero)
    check(
        lambda i, s, z: q.dequantize_per_tensor.tensor(i, s, z, -128, 127, torch.int8), integers, scale, told
    )


@pytest.mark.parametrize("zeros", [torch.tensor([3, 200, -129]), torch.tensor([0.5, -7.25, 0.0])])
def test_zero_points_of_channels_may_be_any_number(zeros: torch.Tensor) -> None:
    q = torch.ops.quantized_decomposed
    integers = q.quantize_per_channel(X, SCALES, ZEROS, 1, -128, 127, torch.int8)
    check(lambda i: q.dequantize_per_channel(i, SCALES, zeros, 1, -128, 127, torch.int8), integers)


def test_fake_quantize() -> None:
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.0217, 5, 0, 255), X)
    check(lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS.to(torch.int32), 1, -128, 127), X)


def test_an_integer_type_without_a_layer_is_refused() -> None:
    q = torch.ops.quantized_decomposed
    module: fx.GraphModule = program_of(
        lambda x: q.quantize_per_tensor(x, 0.1, 0, -(2**31), 2**31 - 1, torch.int32), X
    )
    with pytest.raises(NodeError, match=r"dtype=torch.int32 is not handled"):
        convert(module)
