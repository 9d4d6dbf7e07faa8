"""Elementwise programs of dynamic shape: converted once, run at three shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.one_node import network_of
from tests.processors import skip_unless_rounded
from torch import nn
from torch.export import Dim, export

import intarsia
from intarsia.convert import convert, registry
from intarsia.errors import IntarsiaError
from intarsia.lower import lower

SHAPES = ((2, 3), (5, 7), (4, 11))
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def arithmetic(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x + y * 2 - 0.5) / (y.abs() + 1), torch.where(x > y, x, 3), x.maximum(y).clamp(-0.5, 0.5)


def integers(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = (x * 10).to(torch.int64), (y * 10).to(torch.int32).abs() + 1
    return a // b, a % b, (a << 2) & b, a.remainder(3), (a > b) ^ (b > 2), a**3


def activations(x: torch.Tensor, y: torch.Tensor) -> Any:
    f = nn.functional
    halves = torch.cat((x, y), dim=1)
    return f.gelu(x), f.glu(halves), f.softplus(y), f.elu(x, 0.5), f.silu(y), f.mish(x), f.logsigmoid(x)


def sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows, columns = x.shape
    position = torch.arange(columns) + rows
    return x * rows, position, torch.full((rows, 2), 1.5), torch.zeros_like(y), x.new_ones(columns, rows)


def masks(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = x.shape[0]
    mask = torch.eye(rows, dtype=torch.bool)
    grid = torch.arange(0, rows, dtype=torch.float32)
    down = torch.arange(rows, -rows, -1.0)
    return torch.zeros(rows, rows).masked_fill(mask, -1e9), grid / rows, torch.arange(rows, 3 * rows), down


def half(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = x.half(), y.bfloat16()
    return a * a + 1, b * 2, a.to(torch.bool), x.type_as(b)


def rounding(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (
        x.round(),
        (x * 3).trunc(),
        y.frac(),
        x.floor() + y.ceil(),
        torch.atan2(x, y),
        x.expm1(),
        y.lerp(x, 0.2),
    )


class _Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize(
    "function",
    [arithmetic, integers, activations, sizes, masks, half, rounding],
    ids=lambda function: str(function.__name__),
)
def test_three_shapes(function: Callable[..., Any], engine: str) -> None:
    if function is half:
        skip_unless_rounded(engine, torch.bfloat16)
    dims = {0: Dim("rows", min=2, max=64), 1: Dim("columns", min=2, max=64)}
    example = (torch.randn(3, 4), torch.randn(3, 4))
    exported = export(_Module(function), example, dynamic_shapes={"x": dims, "y": dims}, strict=False)
    lowered = lower(exported, lambda target: target in registry)
    program = drivers.build(engine, convert(lowered.module))
    for number, shape in enumerate(SHAPES):
        torch.manual_seed(number)
        x, y = torch.randn(shape), torch.randn(shape)
        expected = function(x, y)
        for answer, wanted in zip(program(x, y), expected, strict=True):
            tolerance = TOLERANCE.get(wanted.dtype, 1e-4)
            torch.testing.assert_close(answer, wanted, rtol=tolerance, atol=tolerance / 10)


class _Numbers(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> Any:
        number = count.item()
        torch._check(number >= 2)
        torch._check(number <= x.shape[0])
        total = x.sum().item()
        return x * number + number / 2, torch.full((3,), number), torch.arange(number), x * total


def test_a_tensor_read_as_a_number() -> None:
    x = torch.randn(5, 4)
    # The check that a number is no negative size stays with PyTorch.
    program = intarsia.compile(_Numbers(), (x, torch.tensor(3)), engines=["onnxruntime"], min_block_size=1)
    for number in (2, 3, 4):
        count = torch.tensor(number)
        for answer, wanted in zip(program(x, count), _Numbers()(x, count), strict=True):
            torch.testing.assert_close(answer, wanted)


# What elementwise converters do not take, they refuse with a sentence that holds the value.


aten = torch.ops.aten
FLOATS = torch.ones(2, 3)
INTEGERS = torch.ones(2, 3, dtype=torch.int64)
CASES: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.dropout.default, (FLOATS, 0.5, True), "p=0.5 in training"),
    (aten.native_dropout.default, (FLOATS, 0.25, True), "p=0.25 in training"),
    (aten.rrelu.default, (FLOATS, 0.1, 0.3, True), "training=True"),
    (aten.clamp.default, (FLOATS, float("nan")), "a bound that is NaN"),
    (aten.abs.default, (torch.ones(2, dtype=torch.complex64),), "complex64 has no ONNX type"),
]


@pytest.mark.parametrize(("target", "args", "sentence"), CASES, ids=lambda value: str(value)[:40])
def test_reason_holds_the_value(target: Any, args: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(IntarsiaError) as caught:
        network_of(target, *args)
    assert sentence in str(caught.value)


def test_one_layer_stays_one_layer() -> None:
    """The common case in float32 has no detours."""
    for target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        assert len(network_of(target, FLOATS, FLOATS)) == 1
    for target in (
        aten.relu.default,
        aten.gelu.default,
        aten.exp.default,
        aten.tanh.default,
        aten.neg.default,
    ):
        assert len(network_of(target, FLOATS)) == 1
    assert len(network_of(aten.pow.Tensor_Scalar, FLOATS, 2)) == 1
    assert len(network_of(aten.to.dtype, FLOATS, torch.float16)) == 1
