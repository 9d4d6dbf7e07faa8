"""Elementwise programs of dynamic shape: converted once, run at three shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from tests.convert import drivers
from tests.convert.programs import lowered_program, network_of
from tests.processors import skip_unless_rounded
from torch import nn
from torch.export import Dim, export

import intarsia
from intarsia.convert import convert, registry
from intarsia.errors import IntarsiaError
from intarsia.lower import lower
from intarsia.network import Network

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


# Programs of every converter family: converted once with open sizes, run at three shapes, equal to eager.


G = torch.Generator().manual_seed(0)
W, V, B = torch.randn(6, 8, generator=G), torch.randn(8, 8, generator=G), torch.randn(8, generator=G)
KERNEL = torch.randn(5, 3, 3, 3, generator=G)
BACK = torch.randn(3, 5, 2, 2, generator=G)
TABLE = torch.randn(11, 8, generator=G)
MEAN, VAR = torch.randn(3, generator=G), torch.rand(3, generator=G) + 0.5

Rows = Callable[..., Any]
# Programs of x: float32[batch, length, 8].
SEQUENCES: dict[str, Rows] = {
    "arithmetic": lambda x: (x * 2 + x.shape[1] - x**2) / (x.abs() + 1),
    "comparison": lambda x: torch.where((x > 0) & (x < 1), x, -x),
    "division": lambda x: torch.floor_divide(x, 0.5) + torch.remainder(x, 0.25),
    "activation": lambda x: f.gelu(x) + f.silu(x) + f.softplus(x) + f.hardswish(x) + f.elu(x),
    "cast": lambda x: x.to(torch.int64).to(torch.float32) + x.bool(),
    "creation": lambda x: x + torch.arange(x.shape[1])[:, None] + torch.ones_like(x) + x.new_full((8,), 2.0),
    "mask": lambda x: (
        x[:, :, :1]
        .expand(-1, -1, x.shape[1])
        .masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
    ),
    "linear": lambda x: f.linear(x, V, B) @ V,
    "batched product": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "einsum": lambda x: torch.einsum("bld,bmd->blm", x, x),
    "softmax": lambda x: f.softmax(x, 1) + f.log_softmax(x, -1),
    "layer norm": lambda x: f.layer_norm(x, (8,), B, B),
    "rms norm": lambda x: f.rms_norm(x, (8,), B),
    "attention": lambda x: f.scaled_dot_product_attention(*(x.view(*x.shape[:2], 2, 4).transpose(1, 2),) * 3),
    "causal attention": lambda x: f.scaled_dot_product_attention(x, x, x, is_causal=True),
    "reduce": lambda x: x.sum(1) + x.mean(1) + x.amax(1) + x.std(1) + x.prod(1),
    "reduce all": lambda x: x.sum() + x.max() + x.mean(),
    "any and all": lambda x: (x > 0).any(1) | (x > -1).all(1),
    "cumulative": lambda x: x.cumsum(1),
    "argmax": lambda x: x.argmax(1),
    "sort": lambda x: x.sort(1, descending=True).values,
    "topk": lambda x: x.topk(3, 1).values,
    "view": lambda x: x.reshape(x.shape[0], x.shape[1] * 2, 4).flatten(1),
    "transpose": lambda x: x.permute(2, 0, 1).unsqueeze(0).squeeze(0).contiguous(),
    "slice": lambda x: x[:, 1:-1, ::2],
    "split": lambda x: torch.cat(list(x.chunk(2, -1))[::-1], -1),
    "join": lambda x: torch.cat([x, x * 2], 1) + torch.stack([x, x], 1).flatten(1, 2),
    "expand": lambda x: x[:, :1].expand(-1, x.shape[1], -1) + x,
    "repeat": lambda x: x.repeat(1, 2, 1),
    "flip and roll": lambda x: x.flip(1) + x.roll(1, 1),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "index select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "embedding": lambda x: f.embedding(x.abs().long().clamp(max=10), TABLE),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0),
    "index put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(5.0)),
    "pad": lambda x: f.pad(x, (1, 2, 0, 3), value=1.5),
    "tril": lambda x: torch.bmm(x, x.transpose(1, 2)).tril(),
}
# Programs of x: float32[batch, 3, height, 12].
IMAGES: dict[str, Rows] = {
    "convolution": lambda x: f.conv2d(x, KERNEL, stride=2, padding=1),
    "grouped convolution": lambda x: f.conv2d(x, KERNEL[:3, :1], groups=3, dilation=2, padding="same"),
    "transposed convolution": lambda x: f.conv_transpose2d(x, BACK, stride=2),
    "max pool": lambda x: f.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: f.avg_pool2d(x, 2),
    "global pool": lambda x: f.adaptive_avg_pool2d(x, 1).flatten(1),
    "batch norm": lambda x: f.batch_norm(x, MEAN, VAR),
    "group norm": lambda x: f.group_norm(x, 3),
    "instance norm": lambda x: f.instance_norm(x),
    "nearest": lambda x: f.interpolate(x, scale_factor=2),
    "bilinear": lambda x: f.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "pixel shuffle": lambda x: f.pixel_unshuffle(x, 2),
    "reflection": lambda x: f.pad(x, (1, 1, 2, 2), mode="reflect"),
}


@functools.lru_cache(maxsize=1)  # the engines of a program follow each other
def network(function: Rows, shape: tuple[int, ...], open_dims: tuple[int, int]) -> Network:
    sizes = {open_dims[0]: Dim("batch", min=2, max=64), open_dims[1]: Dim("length", min=4, max=128)}
    if function is IMAGES["pixel shuffle"]:
        sizes[open_dims[1]] = 2 * Dim("half", min=2, max=64)
    return convert(lowered_program(function, torch.randn(shape, generator=G), dynamic=(sizes,)))


def check(function: Rows, engine: str, shapes: list[tuple[int, ...]], open_dims: tuple[int, int]) -> None:
    program = drivers.build(engine, network(function, shapes[0], open_dims))
    for shape in shapes[1:]:
        x = torch.randn(shape, generator=G)
        (result,) = program(x)
        torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, engine: str) -> None:
    check(SEQUENCES[name], engine, [(3, 10, 8), (2, 5, 8), (7, 10, 8), (4, 33, 8)], (0, 1))


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, engine: str) -> None:
    check(IMAGES[name], engine, [(3, 3, 10, 12), (2, 3, 6, 12), (5, 3, 24, 12), (4, 3, 40, 12)], (0, 2))
