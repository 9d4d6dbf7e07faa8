"""Values that OpenVINO's kernels treat unlike torch: PyTorch answers those calls, and nobody else's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.convert.programs import program_of
from tests.functions import Function
from torch import nn

import intarsia
from intarsia.convert import convert
from intarsia.engines import OpenVINO
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.openvino.limits import OpenVINOLimits
from intarsia.errors import EngineError, GuardError
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F

pytestmark = pytest.mark.openvino

NAN, INF = float("nan"), float("inf")
Call = Callable[..., Any]


def compiled(function: Call, *args: torch.Tensor, **options: Any) -> Any:
    """On OpenVINO entirely, or the test would say nothing."""
    model = function if isinstance(function, nn.Module) else Function(function)
    fast = intarsia.compile(model.eval(), args, engines=["openvino"], min_block_size=1, **options)
    assert fast.plan.engines == ("openvino",), fast.plan
    return fast


def answer(fast: Any, *args: torch.Tensor, left: bool) -> Any:
    """What a compiled model answers; PyTorch ran the call exactly if `left`."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fast(*args)
    sentences = [str(w.message) for w in told if "PyTorch runs this call" in str(w.message)]
    assert bool(sentences) == left, sentences
    return result


def quietly(fast: Any, *args: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fast(*args)


def whole_numbers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


SMALL = whole_numbers(3, -7, 12, 5, 0, 1)
# Each function, and values at which OpenVINO alone is wrong.
INTEGERS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "equal": (lambda a: a * 3 == a + a.flip(0), (2**24 + 1, 2**31 + 5, 2**40)),
    "compared": (lambda a: (a * 3 < a.flip(0) + a, a >= a.flip(0)), (2**24 + 1, 2**31 + 5)),
    "remainder": (lambda a: a % 7, (2**24 + 1, 2**30 + 1, 2**33)),
    "quotient": (lambda a: torch.div(a, 3, rounding_mode="floor"), (2**24 + 1, 2**30 + 7, 2**33)),
    "power": (lambda a: a**2, (2**13 + 1, 2**20, 2**31)),
    "padded": (lambda a: nn.functional.pad(a, (1, 1), value=7), (2**24 + 1, 2**32)),
    "sum": (lambda a: a.sum(), (2**24 + 1, 2**31 - 1, 2**40 + 1)),
    "running sum": (lambda a: a.cumsum(0), (2**31 - 1, 2**40 + 1)),
    "product": (lambda a: a * a.flip(0), (2**24 + 1, 2**31, 2**40)),
    "product by a constant": (lambda a: a * 1000, (2**24 + 1, 2**31, 2**40)),
    "added": (lambda a: a + a.flip(0), (2**31 - 1, 2**33)),
    "chosen": (lambda a: torch.where(a % 2 == 0, a, a.flip(0)), (2**24 + 1, 2**35)),
    "clamped": (lambda a: a.clamp(-5, 2**20), (2**24 + 1, 2**35)),
    "largest": (lambda a: (a.amax(), a.max(0).values), (2**24 + 1, 2**35)),
    "moved": (lambda a: a.reshape(2, 3).T.repeat(2, 1), (2**31, 2**40)),
    "as floats": (lambda a: a.reshape(2, 3).float() * 0.5, (2**40,)),
    "of 32 bits": (lambda a: torch.where(a.int() % 2 == 1, a.int(), -a.int()), (2**24 + 1, 2**30 + 1)),
    "rounded floats": (lambda a: (a.float() * 1.5).floor().long(), (2**31, 2**40)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beyond_its_arithmetic(name: str) -> None:
    function, hard = INTEGERS[name]
    fast = compiled(function, SMALL)
    torch.testing.assert_close(answer(fast, SMALL.flip(0), left=False), function(SMALL.flip(0)))
    for value in hard:
        for sign in (1, -1):
            a = SMALL.clone()
            a[1] = sign * value
            torch.testing.assert_close(quietly(fast, a), function(a), rtol=0, atol=0)


TABLE = torch.arange(40.0).reshape(10, 4)
INDEXED: dict[str, tuple[Call, torch.Tensor]] = {
    "embedding": (lambda i: nn.functional.embedding(i, TABLE), whole_numbers(0, 9, 3)),
    "embedding of a batch": (lambda i: nn.functional.embedding(i[:, None], TABLE), whole_numbers(0, 9)),
    "index_select": (lambda i: (TABLE * 2).index_select(0, i), whole_numbers(0, 9, 3)),
    "index": (lambda i: TABLE[i], whole_numbers(0, -10, 3)),
    "index of two": (lambda i: TABLE[i % 4, i], whole_numbers(0, 3, -3)),
    "gather": (lambda i: TABLE.gather(0, i), whole_numbers(0, 9, 3, 1).reshape(1, 4)),
    "scatter": (lambda i: TABLE.scatter(0, i, 7.0), whole_numbers(0, 9, 3, 1).reshape(1, 4)),
    "index_put": (
        lambda i: TABLE.index_put((i,), torch.zeros(())),
        whole_numbers(0, 9, -3),
    ),
    "take": (lambda i: TABLE.take(i), whole_numbers(0, 39, -40)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_is_pytorchs_error(name: str) -> None:
    function, indices = INDEXED[name]
    fast = compiled(function, indices)
    torch.testing.assert_close(answer(fast, indices, left=False), function(indices))
    for wrong in (10 if name != "take" else 40, -41, 10**8, 2**32, 2**40 + 1):
        bad = indices.clone()
        bad.view(-1)[0] = wrong
        with pytest.raises((IndexError, RuntimeError), match=r"(?i)index|out of") as expected:
            function(bad)
        with pytest.raises(expected.type, match=r"(?i)index|out of"):
            quietly(fast, bad)
        torch.testing.assert_close(answer(fast, indices, left=False), function(indices))


class Pick(nn.Module):
    """Rows by number."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (x + 1).index_select(0, rows)


def test_an_index_into_a_size_that_varies() -> None:
    x, rows = torch.randn(6, 3), whole_numbers(0, 5, 2)
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=64)}, "rows": None}
    fast = compiled(Pick(), x, rows, dynamic_shapes=shapes, verify=False)
    for count in (6, 9, 64):
        x = torch.randn(count, 3)
        rows[0] = count - 1
        torch.testing.assert_close(answer(fast, x, rows, left=False), Pick()(x, rows))
        rows[0] = count
        with pytest.raises((IndexError, RuntimeError), match="index"):
            quietly(fast, x, rows)


def test_division_by_zero_is_pytorchs_error() -> None:
    fast = compiled(lambda a, b: torch.div(a, b, rounding_mode="trunc"), SMALL, torch.ones_like(SMALL))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        quietly(fast, SMALL, torch.zeros_like(SMALL))


conv, linear = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(17, 6)
IMAGE = torch.randn(2, 3, 9, 17)
BLIND: dict[str, Call] = {
    "relu": torch.relu,
    "relu of a convolution": lambda x: torch.relu(conv(x)),
    "relu of a matrix product": lambda x: torch.relu(linear(x)),
    "relu6": nn.functional.relu6,
    "clamp": lambda x: conv(x).clamp(0.1, 0.5),
    "maximum": lambda x: torch.maximum(x, x.flip(0) * 2),
    "minimum": lambda x: torch.minimum(x.flip(0), x * 2),
    "largest": lambda x: (x.amax(-1), x.amin((1, 2)), x.amax()),
    "where the largest is": lambda x: (x.argmax(-1), x.argmin(1)),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(1)),
    "max pool": lambda x: nn.functional.max_pool2d(x, 2),
    "hardsigmoid": lambda x: nn.functional.hardsigmoid(conv(x)),
    "exp": torch.exp,
    "topk": lambda x: x.topk(3, -1).values,
    "sort": lambda x: x.sort(-1).values,
    "compared": lambda x: (x > 0.25, x >= x.flip(0), x < 0.25, x <= 0.5, x == x, x != x),
    "true or not": lambda x: x.bool(),
    "sign": torch.sign,
    "prelu and softplus": lambda x: nn.functional.softplus(nn.functional.prelu(x, torch.tensor(0.2))),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x * 0.5, x.flip(-1)),
    "layer norm": lambda x: nn.functional.layer_norm(x, (17,)),
    "mean of relu": lambda x: torch.relu(x).mean((2, 3)),
}


@pytest.mark.parametrize("name", BLIND)
def test_no_nan_is_lost(name: str) -> None:
    function = BLIND[name]
    with torch.no_grad():
        fast = compiled(function, IMAGE)
        torch.testing.assert_close(
            answer(fast, IMAGE * 2, left=False), function(IMAGE * 2), rtol=1e-4, atol=1e-5
        )
        for places, value in (([0], NAN), ([5, 100, 917], NAN), ([3], INF), ([4], -INF), ([7, 8], 1e38)):
            x = IMAGE.clone()
            x.view(-1)[places] = value
            torch.testing.assert_close(quietly(fast, x), function(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_nan_that_arises_inside() -> None:
    layers = [m for _ in range(40) for m in (nn.Linear(8, 8, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(8, 2, bias=False), nn.ReLU()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
        model[-2].weight[:, ::2] = -3.0
        small, large = torch.zeros(1, 8), torch.ones(1, 8)
        fast = compiled(model, small)
        torch.testing.assert_close(answer(fast, small, left=False), model(small))
        assert model(large).isnan().all()  # 24 to the power of 40 is infinite, and infinities cancel
        torch.testing.assert_close(answer(fast, large, left=True), model(large), equal_nan=True)


def test_nan_passes_where_no_kernel_minds() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.BatchNorm1d(6), nn.SiLU())
    x = torch.randn(3, 6)
    with torch.no_grad():
        fast = compiled(model, x)
        x[1, 2] = NAN
        torch.testing.assert_close(answer(fast, x, left=False), model(x), equal_nan=True)


def test_nan_that_the_model_takes_out_is_the_engines_business() -> None:
    def cleaned(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.where(x.isnan(), 0.0, x))

    x = torch.randn(50)
    fast = compiled(cleaned, x)
    x[::3] = NAN
    torch.testing.assert_close(answer(fast, x, left=False), cleaned(x))


def test_masks_of_minus_infinity_are_the_engines_business() -> None:
    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).masked_fill(mask, -INF).softmax(-1) @ torch.relu(x)

    x, mask = torch.randn(2, 8, 16), torch.ones(8, 8).triu(1).bool()
    fast = compiled(masked, x, mask)
    torch.testing.assert_close(answer(fast, x, mask, left=False), masked(x, mask))
    mask[3] = True  # a row without anything is NaN
    torch.testing.assert_close(answer(fast, x, mask, left=False), masked(x, mask), equal_nan=True)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -INF], ids=["least", "infinity"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "products"])
def test_a_mask_of_the_least_number_may_come_from_another_segment(least: float, fused: bool) -> None:
    """T5 adds such a mask in every layer. Finding each by bisection took 19 of 52 s of a compile."""

    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if fused:
            return torch.relu(nn.functional.scaled_dot_product_attention(x, x, x, mask, scale=1.0))
        return torch.relu((x @ x.mT + mask).softmax(-1) @ x)

    x, mask = torch.randn(2, 4, 8, 16), torch.randn(2, 1, 8, 8)
    mask[..., 5:] = least
    fast = compiled(lambda x, mask: attend(attend(x, mask) + x, mask), x, mask)
    torch.testing.assert_close(answer(fast, x, mask, left=False), attend(attend(x, mask) + x, mask))
    mask[0, 0, 0, 0] = float("nan")
    torch.testing.assert_close(
        answer(fast, x, mask, left=True), attend(attend(x, mask) + x, mask), equal_nan=True
    )


def guards_of(function: Call | nn.Module, *args: torch.Tensor) -> Sequence[str]:
    fast = compiled(function, *args)
    return [guard for step in fast.inlay.steps for guard in step.program.program.guards]


def test_guards_are_few() -> None:
    bounded = nn.Sequential(*[m for _ in range(30) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU6())])
    assert guards_of(bounded, IMAGE) == [
        "input_1 must be finite, the sum of its magnitudes at most 6.872e+10"
    ]
    assert guards_of(nn.Sequential(nn.Linear(17, 4), nn.Sigmoid()), IMAGE) == []
    assert len(guards_of(lambda i: nn.functional.embedding(i.reshape(-1), TABLE), whole_numbers(1, 2))) == 1
    assert guards_of(lambda x: TABLE[torch.arange(4)] + x, torch.ones(4)) == []
    blocks = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(17, 17), nn.ReLU(), nn.LayerNorm(17))])
    assert len(guards_of(blocks, IMAGE)) == 1


class Look(nn.Module):
    """A table of ten rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, TABLE * 2) + ids.sum()


def test_one_warning_names_the_input_its_value_and_the_bound() -> None:
    fast = compiled(Look(), whole_numbers(1, 2))
    bad = whole_numbers(-3, 2**35)
    said = "PyTorch runs this call .*: ids must lie between 0 and 9; it holds -3 to 34359738368"
    with pytest.warns(UserWarning, match=said), pytest.raises(IndexError):
        fast(bad)
    with warnings.catch_warnings(record=True) as told, pytest.raises(IndexError):
        fast(bad)
    assert not told


def test_an_example_that_pytorch_must_answer_moves_the_layer_to_pytorch() -> None:
    x = torch.tensor([1.0, NAN, -1.0])
    fast = intarsia.compile(
        Function(lambda x: torch.relu(x.sin()) * 2), (x,), engines=["openvino"], min_block_size=1
    )
    assert "pytorch" in fast.plan.engines and "it holds nan to nan" in str(fast.plan)
    torch.testing.assert_close(fast(x), torch.relu(x.sin()) * 2, equal_nan=True)


def test_bare_programs_raise() -> None:
    net = Network()
    with net_guard(net):
        F.relu(Tensor("x", torch.float32, (4,))).mark_output("y")
    program = OpenVINO().build(net)
    with pytest.raises(GuardError, match="x must not hold NaN; it holds nan to nan"):
        program(torch.tensor([1.0, NAN, 2.0, 3.0]))
    torch.testing.assert_close(
        program(torch.tensor([1.0, -INF, INF, -0.0]))[0], torch.tensor([1.0, 0, INF, 0])
    )


def test_without_guards() -> None:
    net = Network()
    with net_guard(net):
        F.relu(Tensor("x", torch.float32, (4,))).mark_output("y")
    program = OpenVINO(guards=False).build(net)
    assert program(torch.tensor([1.0, NAN, -2.0, 3.0]))[0][[0, 2, 3]].tolist() == [1.0, 0.0, 3.0]


def test_threads_have_guards_of_their_own() -> None:
    x = torch.randn(64, 64)
    fast = compiled(lambda x: torch.relu(x @ x), x)
    bad = x.clone()
    bad[0, 0] = NAN
    wrong: list[str] = []

    def caller(given: torch.Tensor) -> None:
        for _ in range(30):
            if not torch.allclose(fast(given), torch.relu(given @ given), atol=1e-3, equal_nan=True):
                wrong.append("wrong")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=caller, args=(given,)) for given in (x, bad, x, bad)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_least_integer_is_true(dtype: torch.dtype) -> None:
    """OpenVINO takes -2**31 for zero where it is made a truth value; such a call is PyTorch's."""

    class Truth(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.logical_not(x)

    x = torch.tensor([0, 1, -1], dtype=dtype)
    fast = intarsia.compile(Truth(), (x,), engines=["openvino"], min_block_size=1)
    assert fast.plan.on_engines == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the call is PyTorch's, which is told once
        assert fast(torch.tensor([0, -(2**31), 2**31 - 1], dtype=dtype)).tolist() == [True, False, False]


DENORMALS = torch.tensor([2.0**-149, -(2.0**-140), 2.0**-129, 2.0**-126, 0.0, 1e-20, 3.0, INF, NAN])
DIVISIONS: dict[str, Call] = {
    "quotient": lambda x, y: x / y,
    "of halves of denormals": lambda x, y: (x * 0.5) / (y * 0.5),
    "by a column": lambda x, y: x / y[:, None],
    "added": lambda x, y: torch.addcdiv(x, x, y),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisors_whose_reciprocal_overflows(name: str) -> None:
    """OpenVINO multiplies by the reciprocal: 0 by the smallest number was NaN, that by itself infinite."""
    fast = compiled(DIVISIONS[name], torch.ones(9, 9), torch.ones(9))
    for x in (0.0, 2.0**-149, -(2.0**-127), 1e-10, 3.0, 3e38, INF, NAN):
        given = torch.full((9, 9), x)
        want = DIVISIONS[name](given, DENORMALS)
        torch.testing.assert_close(answer(fast, given, DENORMALS, left=False), want, equal_nan=True)


def test_a_constant_divisor_without_a_reciprocal_is_refused() -> None:
    net = convert(program_of(lambda x: x / DENORMALS, torch.ones(9)))
    with pytest.raises(EngineError, match="a constant divisor is denormal; OpenVINO has no reciprocal of it"):
        OpenVINO().build(net)


def divided(function: Call, *args: torch.Tensor) -> list[str]:
    net = convert(program_of(function, *args))
    return plan_guards(net, OpenVINOLimits(net)).divided


def test_divisors_known_to_be_normal_cost_nothing() -> None:
    x = torch.ones(2, 3)
    assert divided(lambda x: x / x.sum(-1, keepdim=True), x)
    assert not divided(lambda x: x / 3.0, x)
    assert not divided(lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-9), x)
    assert not divided(lambda x: nn.functional.normalize(x), x)
    assert not divided(lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(), x)
    assert not divided(lambda x: x / x.sum(-1, keepdim=True), x.half())
