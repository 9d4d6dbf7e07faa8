"""OpenVINO is not given what it would answer wrongly; what it is given, it answers rightly."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

import intarsia
from intarsia.cache.machine import is_arm
from intarsia.engines import OpenVINO
from intarsia.engines.openvino.limits import HANDS_NAN_ON
from intarsia.errors import EngineError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

pytestmark = pytest.mark.openvino


def network(body: Callable[..., Tensor], *inputs: torch.Tensor) -> Network:
    net = Network()
    with net_guard(net):
        body(*(Tensor(f"x{i}", x.dtype, tuple(x.shape)) for i, x in enumerate(inputs))).mark_output("y")
    return net


REFUSED = {
    "float64": (lambda x: x + x, (torch.zeros(2, dtype=torch.float64),), "x0 is float64"),
    "float64 inside": (
        lambda x: F.cast(F.cast(x, torch.float64), torch.float32),
        (torch.zeros(2),),
        "is float64",
    ),
    "long constant": (
        lambda x: F.add(x, F.constant(np.array(2**40))),
        (torch.zeros(2, dtype=torch.int64),),
        "a constant of Add holds 1099511627776; OpenVINO is correct from "
        + ("-16777216 to 16777216" if is_arm() else "-2147483648 to 2147483647"),
    ),
    "equal to more than floats hold": (
        lambda x: F.equal(x, F.constant(np.array(2**24 + 1))),
        (torch.zeros(2, dtype=torch.int64),),
        "a constant of Equal holds 16777217; OpenVINO is correct from -16777216 to 16777216",
    ),
    "nobody knows what it makes": (
        lambda x: F.opaque("nobody.knows", "Mystery", x, makes=[(torch.int64, (2,))])[0],
        (torch.zeros(2),),
        "OpenVINO",
    ),
    "a table too long to check": (
        lambda x: F.gather(F.expand(F.constant(1.0), [2**23]), x),
        (torch.zeros(2, dtype=torch.int64),),
        "Gather into 8388608 elements: OpenVINO does not check such indices",
    ),
    "empty look-up": (
        lambda x, i: F.gather(x, i),
        (torch.zeros(3), torch.zeros(0, dtype=torch.int64)),
        r"Gather of the empty tensor x1\[0\] is not safe",
    ),
    "empty product": (
        lambda a, b: F.matmul(a, b),
        (torch.zeros(2, 0), torch.zeros(0, 3)),
        "MatMul of the empty tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    body, inputs, reason = REFUSED[name]
    net = network(body, *inputs)
    with pytest.raises(EngineError, match=reason):
        OpenVINO().build(net)
    assert "OpenVINO" in str(OpenVINO().probe(net))


TAKEN = {
    "join with an empty one": (lambda a, b: F.concat([a, b], 0), (torch.zeros(0, 3), torch.ones(2, 3))),
    "sum of nothing": (lambda a: F.reduce_sum(a, [0], keepdims=False), (torch.zeros(0, 3),)),
    "empty and empty": (lambda a: F.relu(a) + 1.0, (torch.zeros(0, 3),)),
    "any of several": (
        lambda a: F.reduce_max(F.cast(F.greater(a, 0.0), torch.int32), [0], keepdims=False),
        (torch.tensor([-1.0, 2.0]),),
    ),
    "largest integer": (
        lambda a: F.reduce_max(a, [0], keepdims=False),
        (torch.tensor([3, -(2**24), 2**24], dtype=torch.int32) // 4,),
    ),
    "a remainder of floats": (
        lambda a: F.mod(a, 0.1, fmod=True),
        (torch.tensor([1.0, -7.3, 1e5, 0.2]),),
    ),
    "to the end": (lambda a: F.slice(a, 1, 2**62, axis=0), (torch.arange(4.0),)),
    "an input nobody reads": (lambda a, b: F.relu(b), (torch.ones(3), torch.ones(2))),
}
EXPECTED = {
    "join with an empty one": torch.ones(2, 3),
    "sum of nothing": torch.zeros(3),
    "empty and empty": torch.zeros(0, 3),
    "any of several": torch.tensor(1, dtype=torch.int32),
    "largest integer": torch.tensor(2**22, dtype=torch.int32),
    "a remainder of floats": torch.tensor([1.0, -7.3, 1e5, 0.2]).fmod(0.1),
    "to the end": torch.tensor([1.0, 2.0, 3.0]),
    "an input nobody reads": torch.ones(2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_and_right(name: str) -> None:
    body, inputs = TAKEN[name]
    (result,) = OpenVINO(threads=1).build(network(body, *inputs))(*inputs)
    torch.testing.assert_close(result, EXPECTED[name])


class Rounded(torch.nn.Module):
    def __init__(self, rounding) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.rounding(x / y)


@pytest.mark.parametrize(
    "rounding",
    [torch.floor, torch.ceil, lambda q: torch.round(q / 2), lambda q: (q + 1).clamp(0, 99).long()],
    ids=["floor", "ceil", "round", "cast"],
)
def test_quotients_that_are_rounded_later_are_exact(rounding) -> None:
    """41 / 41 by the reciprocal of 41 is less than 1, and its floor was 0."""
    model, example = Rounded(rounding), (torch.rand(64, 64) + 1, torch.rand(64, 64) + 1)
    fast = intarsia.compile(model, example, engines=["openvino"], min_block_size=1)
    numbers = torch.arange(1.0, 4097.0).reshape(64, 64)
    divisors = torch.arange(1.0, 65.0).expand(64, 64).contiguous()
    assert torch.equal(fast(numbers, divisors), model(numbers, divisors))
    assert "openvino does not divide exactly" in str(fast.plan)


def test_quotients_that_stay_floats_are_openvinos() -> None:
    model, example = Rounded(torch.tanh), (torch.rand(64, 64) + 1, torch.rand(64, 64) + 1)
    fast = intarsia.compile(model, example, engines=["openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)


# Layers said to hand NaN on do: alone, in a chain, behind a convolution, behind a product of matrices.


nn = torch.nn.functional
NAN = float("nan")
Pair = tuple[Callable[[Tensor], Tensor], Callable[[torch.Tensor], torch.Tensor]]
ONES = {"strides": [1, 1], "dilations": [1, 1]}
KERNEL = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) * 0.2
MATRIX = torch.randn(40, 40, generator=torch.Generator().manual_seed(1)) * 0.3
FOUR = torch.tensor([0.5, -2.0, 1.5, 0.25])
# fmt: off
NAMES = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "floor", "isinf",
    "isnan", "log", "neg", "reciprocal", "round", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
]
# fmt: on
BY_NAME = {name: getattr(torch, name) for name in NAMES}
ELEMENTWISE: dict[str, Pair] = {
    **{
        {"isnan": "IsNaN", "isinf": "IsInf"}.get(name, name.title()): (getattr(F, name), reference)
        for name, reference in BY_NAME.items()
    },
    "Add": (lambda x: F.add(x, x), lambda x: x + x),
    "Sub": (lambda x: F.sub(F.constant(1.0), x), lambda x: 1.0 - x),
    "Mul": (lambda x: F.mul(x, x), lambda x: x * x),
    "Div": (lambda x: F.div(F.constant(1.5), x), lambda x: 1.5 / x),
    "Pow": (lambda x: F.pow(x, 3.0), lambda x: x**3),
    "Mod": (lambda x: F.mod(x, 0.3, fmod=True), lambda x: x.fmod(0.3)),
    "Elu": (F.elu, nn.elu),
    "Gelu": (F.gelu, nn.gelu),
    "HardSwish": (F.hardswish, nn.hardswish),
    "Identity": (F.identity, lambda x: x),
    "LeakyRelu": (F.leaky_relu, nn.leaky_relu),
    "Mish": (F.mish, nn.mish),
    "PRelu": (lambda x: F.prelu(x, torch.tensor([0.25])), lambda x: nn.prelu(x, torch.tensor([0.25]))),
    "Softplus": (F.softplus, nn.softplus),
    "Softsign": (F.softsign, nn.softsign),
    "Equal": (lambda x: F.equal(x, x), lambda x: x == x),
    "Greater": (lambda x: F.greater(x, 0.1), lambda x: x > 0.1),
    "GreaterOrEqual": (lambda x: F.greater_equal(x, 0.1), lambda x: x >= 0.1),
    "Less": (lambda x: F.less(x, 0.1), lambda x: x < 0.1),
    "LessOrEqual": (lambda x: F.less_equal(x, 0.1), lambda x: x <= 0.1),
    "Where": (lambda x: F.where(F.less(x, 0.1), 0.5, x), lambda x: torch.where(x < 0.1, 0.5, x)),
}
# The last two dimensions are read; more may stand before.
OTHERS: dict[str, Pair] = {
    "Concat": (lambda x: F.concat([x, x], -1), lambda x: torch.cat([x, x], -1)),
    "CumSum": (lambda x: F.cumsum(x, -1), lambda x: x.cumsum(-1)),
    "Expand": (lambda x: F.expand(x, [3, *x.shape]), lambda x: x.expand(3, *x.shape)),  # type: ignore[list-item]
    "Flatten": (lambda x: F.op("Flatten", x, axis=1), lambda x: x.flatten(1)),
    "Gather": (lambda x: F.gather(x, F.ints([0, 2, 0]), -1), lambda x: x[..., [0, 2, 0]]),
    "GatherElements": (
        lambda x: F.gather_elements(x, F.constant(np.zeros(x.shape, np.int64)), -1),
        lambda x: x.gather(-1, torch.zeros(x.shape, dtype=torch.int64)),
    ),
    "GatherND": (lambda x: F.gather_nd(x, F.constant(np.array([[0], [1]]))), lambda x: x[[0, 1]]),
    "Gemm": (
        lambda x: F.gemm(F.reshape(x, [-1, 4]), F.constant(FOUR.reshape(4, 1))),
        lambda x: x.reshape(-1, 4) @ FOUR.reshape(4, 1),
    ),
    "MatMul": (lambda x: F.matmul(x, F.constant(FOUR.reshape(4, 1))), lambda x: x @ FOUR.reshape(4, 1)),
    "Pad": (
        lambda x: F.pad(x, [0] * x.ndim + [0] * (x.ndim - 1) + [2]),
        lambda x: nn.pad(x, (0, 2)),
    ),
    "ReduceL2": (lambda x: F.reduce_l2(x, [-1]), lambda x: x.norm(dim=-1, keepdim=True)),
    "ReduceMean": (lambda x: F.reduce_mean(x, [-1]), lambda x: x.mean(-1, True)),
    "ReduceProd": (lambda x: F.reduce_prod(x, [-1]), lambda x: x.prod(-1, True)),
    "ReduceSum": (lambda x: F.reduce_sum(x, [-1]), lambda x: x.sum(-1, True)),
    "ReduceSumSquare": (lambda x: F.reduce_sumsquare(x, [-1]), lambda x: (x * x).sum(-1, True)),
    "Reshape": (lambda x: F.reshape(x, [-1]), lambda x: x.reshape(-1)),
    "ScatterElements": (
        lambda x: F.scatter_elements(x, F.constant(np.zeros(x.shape, np.int64)), x, -1),
        lambda x: torch.cat([x[..., -1:], x[..., 1:]], -1),
    ),
    "ScatterND": (
        lambda x: F.scatter_nd(x, F.constant(np.array([[0]])), F.slice(x, 1, 2, axis=0)),
        lambda x: torch.cat([x[1:2], x[1:]]),
    ),
    "Shape": (lambda x: F.cast(F.shape(x), torch.float32), lambda x: torch.tensor(x.shape).float()),
    "Size": (lambda x: F.cast(F.op("Size", x), torch.float32), lambda x: torch.tensor(float(x.numel()))),
    "Slice": (lambda x: F.slice(x, 1, 3, axis=-1), lambda x: x[..., 1:3]),
    "Split": (lambda x: F.split(x, [1, 3], -1)[1], lambda x: x[..., 1:]),
    "Squeeze": (lambda x: F.squeeze(F.unsqueeze(x, [0]), [0]), lambda x: x),
    "Tile": (lambda x: F.tile(x, [2] * x.ndim), lambda x: x.repeat(*[2] * x.ndim)),
    "Transpose": (
        lambda x: F.transpose(x, list(reversed(range(x.ndim)))),
        lambda x: x.permute(*reversed(range(x.ndim))),
    ),
    "Unsqueeze": (lambda x: F.unsqueeze(x, [0]), lambda x: x[None]),
}
IMAGES: dict[str, Pair] = {
    "AveragePool": (
        lambda x: F.average_pool(x, [2, 2], strides=[2, 2], pads=[0] * 4),
        lambda x: nn.avg_pool2d(x, 2),
    ),
    "GlobalAveragePool": (lambda x: F.op("GlobalAveragePool", x), lambda x: x.mean((2, 3), True)),
    "BatchNormalization": (
        lambda x: F.batch_norm(x, torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8), 1e-5),
        lambda x: nn.batch_norm(x, torch.zeros(8), torch.ones(8)),
    ),
    "Conv": (
        lambda x: F.conv(x, F.constant(KERNEL), pads=[1] * 4, **ONES),
        lambda x: nn.conv2d(x, KERNEL, padding=1),
    ),
    "ConvTranspose": (
        lambda x: F.conv_transpose(x, F.constant(KERNEL), pads=[1] * 4, output_padding=[0, 0], **ONES),
        lambda x: nn.conv_transpose2d(x, KERNEL, padding=1),
    ),
}


def check(*cases: tuple[Pair, torch.Tensor]) -> None:
    """NaN at the same places; what else there is has its own tests.

    The cases are parts of one network that have nothing to do with each other: most of what OpenVINO takes to
    compile a small one, it takes once.
    """
    net = Network()
    with net_guard(net):
        for place, ((body, _), x) in enumerate(cases):
            body(Tensor(f"x{place}", x.dtype, tuple(x.shape))).mark_output(f"y{place}")
    answers = OpenVINO(threads=1, guards=False).build(net)(*(x for _, x in cases))
    for answer, ((_, reference), x) in zip(answers, cases, strict=True):
        expected = reference(x)
        assert answer.shape == expected.shape
        if expected.dtype == torch.bool:
            torch.testing.assert_close(answer, expected)
        else:
            torch.testing.assert_close(answer.isnan(), expected.isnan())


def spotted(*shape: int) -> torch.Tensor:
    """Numbers between -2 and 2, and now and then none."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 4 - 2
    x.view(-1)[:: 5 if x.numel() < 100 else 97] = NAN
    return x


def test_all_are_tried() -> None:
    assert {*ELEMENTWISE, *OTHERS, *IMAGES} == HANDS_NAN_ON


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_element_by_element(kind: str) -> None:
    body, reference = ELEMENTWISE[kind]

    def last(x: torch.Tensor) -> torch.Tensor:
        return reference(x).float() * 1.5 + 1.0

    def behind(x: Tensor) -> Tensor:
        return F.add(F.mul(F.cast(body(x), torch.float32), 1.5), 1.0)

    def convolved(weight: torch.Tensor, groups: int) -> Pair:
        return (
            lambda x: body(F.conv(x, F.constant(weight), pads=[1] * 4, groups=groups, **ONES)),
            lambda x: reference(nn.conv2d(x, weight, padding=1, groups=groups)),
        )

    alone: Pair = (body, reference)
    chain: Pair = (lambda x: behind(F.mul(F.add(x, 0.5), 1.25)), lambda x: last((x + 0.5) * 1.25))
    product: Pair = (lambda x: body(F.matmul(x, F.constant(MATRIX))), lambda x: reference(x @ MATRIX))
    image = spotted(2, 8, 13, 9)
    check(
        *((alone, spotted(*shape)) for shape in ((1,), (3,), (7,), (17,), (2, 3, 33), (1000,))),
        *((chain, spotted(*shape)) for shape in ((5,), (3, 40))),
        (product, spotted(37, 40)),
        (convolved(KERNEL, 1), image),
        (convolved(KERNEL[:, :1].contiguous(), 8), image),
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_others(kind: str) -> None:
    check(*((OTHERS[kind], spotted(*shape)) for shape in ((5, 4), (2, 33, 4))))


@pytest.mark.parametrize("kind", IMAGES)
def test_of_images(kind: str) -> None:
    check(*((IMAGES[kind], spotted(*shape)) for shape in ((1, 8, 7, 7), (2, 8, 32, 20))))


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_weight_that_comes_as_input_is_watched_where_there_is_padding(value: float) -> None:
    """torch multiplies it with the zeros of the padding too, which is NaN; OpenVINO leaves those out."""

    class Convolution(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return nn.conv2d(x, weight, padding=1)

    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    fast = intarsia.compile(Convolution(), (x, weight), engines=["openvino"], min_block_size=1)
    assert fast.plan.on_engines == 1
    weight[1, 0, 0, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the call is PyTorch's, which is told once
        torch.testing.assert_close(fast(x, weight), Convolution()(x, weight), equal_nan=True)
