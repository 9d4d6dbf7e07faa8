"""Integers, conversions and logarithms on OpenVINO: right on processors whose kernels for them are not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import intarsia
from intarsia.engines.openvino import core as runtime
from intarsia.engines.openvino.core import core

pytestmark = pytest.mark.openvino

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# `x` has fractions, `n` whole numbers, both signs.
CONVERTED: dict[str, Function] = {
    "float + integer": lambda x, n: x + n,
    "integer - float": lambda x, n: n - x,
    "float * mask": lambda x, n: x * (n > 1),
    "mask * float": lambda x, n: (n > 1) * x,
    "float / integer": lambda x, n: x / (n + 20),
    "float ** integer": lambda x, n: (x.abs() + 0.5) ** n.float(),
    "largest of both": lambda x, n: torch.maximum(x, n.float()),
    "float < integer": lambda x, n: x < n,
    "integer <= float": lambda x, n: n <= x,
    "chosen": lambda x, n: torch.where(n > 0, x, n.float()),
    "without fraction": lambda x, n: x.long().float(),
    "without fraction, added": lambda x, n: x.long() + n,
    "without fraction, compared": lambda x, n: n < x.long(),
    "integer + mask": lambda x, n: n + (x > 0),
    "integer + bytes": lambda x, n: n + x.abs().to(torch.uint8),
    "mask of a mask": lambda x, n: x * (x.relu().bool().float() + n.bool().float()),
    "bytes of a sum": lambda x, n: (n * 100 - 7).to(torch.uint8),
    "bytes with a sign": lambda x, n: (n * 100 - 7).to(torch.int8) + n.to(torch.int8),
    "two bytes": lambda x, n: (n.to(torch.int16) * 20000).long(),
    "two bytes of a float": lambda x, n: (x * 20000).to(torch.int16) + n,
    "quotient towards 0": lambda x, n: torch.div(n * 7, 3, rounding_mode="trunc"),
    "quotient downwards": lambda x, n: torch.div(n * 7, -3, rounding_mode="floor"),
    "remainder": lambda x, n: n % 3 + torch.fmod(n, 4),
    "remainder of floats": lambda x, n: torch.remainder(x, 0.3) + torch.fmod(x, n + 0.5),
    "integers in order": lambda x, n: torch.sort(n * 3, 0).values + torch.topk(n - 4, 2, 0).indices[:1],
    "positions": lambda x, n: x + torch.arange(x.shape[1])[:, None],
}


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.function(x, n)


def _tensors(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows * length)
    x = torch.randn(rows, length, 8, generator=made) * 5
    return x, torch.randint(-9, 9, (length, 1), generator=made)


@pytest.mark.parametrize("varying", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("name", CONVERTED)
def test_numbers_of_two_kinds(name: str, varying: bool) -> None:
    model = Applied(CONVERTED[name])
    length = Dim("length", min=2, max=64)
    sizes = {"x": {0: Dim("rows", min=2, max=16), 1: length}, "n": {0: length}} if varying else None
    fast = intarsia.compile(
        model, _tensors(3, 10), engines=["openvino"], dynamic_shapes=sizes, min_block_size=1, verify=False
    )
    assert "openvino" in fast.plan.engines
    for shape in [(3, 10), (2, 5), (7, 33)] if varying else [(3, 10)]:
        call = _tensors(*shape)
        expected = model(*call)
        exact = not expected.is_floating_point()
        torch.testing.assert_close(
            fast(*call), expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, check_dtype=True
        )


INTEGERS = torch.tensor([0, 1, -1, 2**24, 2**24 + 1, -(2**24) - 1, 2**30, 2**31 - 1, -(2**31)])
ARITHMETIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda n: n + 1,
    "difference": lambda n: n - 3,
    "product": lambda n: n * 5,
    "largest": lambda n: torch.clamp(n, max=2**24 + 1),
    "magnitude": torch.abs,
    "negative": torch.neg,
    "bits": lambda n: (n & 0x0FFF0001) | 5,
    "last byte": lambda n: n.to(torch.uint8),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_integers_that_float32_does_not_hold(name: str, dtype: torch.dtype) -> None:
    function = ARITHMETIC[name]
    model = Applied(lambda x, n: function(n))
    example = (torch.zeros(1), torch.arange(len(INTEGERS), dtype=dtype))
    fast = intarsia.compile(model, example, engines=["openvino"], min_block_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a call was left to PyTorch
        torch.testing.assert_close(
            fast(example[0], INTEGERS.to(dtype)), function(INTEGERS.to(dtype)), rtol=0, atol=0
        )


EDGES = [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-45, 1e-40, 2.0**-126, 3.4e38, 1.0]
SMOOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "softplus": F.softplus,
    "log_sigmoid": F.logsigmoid,
    "log of 1 + exp": lambda x: torch.log(1 + torch.exp(x)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_logarithms(name: str) -> None:
    near = torch.cat([1 + torch.linspace(-1e-3, 1e-3, 401), torch.linspace(0.4, 2.2, 401)])
    far = torch.cat([torch.logspace(-38, 38, 801), torch.linspace(-30, 30, 801)])
    x = torch.cat([torch.tensor(EDGES), near, far])
    model = Applied(lambda x, n: SMOOTH[name](x))
    fast = intarsia.compile(
        model, (torch.rand(len(x)), torch.zeros(1)), engines=["openvino"], min_block_size=1
    )
    assert fast.plan.engines == ("openvino",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a call was left to PyTorch
        found = fast(x, torch.zeros(1))
    torch.testing.assert_close(found, SMOOTH[name](x), rtol=2e-6, atol=2e-7, equal_nan=True)


def test_a_row_of_minus_infinities_is_nan() -> None:
    model = Applied(lambda x, n: F.softmax(x.masked_fill(n < 0, -math.inf), -1))
    x, n = torch.randn(3, 8), torch.arange(8) - 4
    fast = intarsia.compile(model, (x, n), engines=["openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)
    for mask in (n, n - 8):
        torch.testing.assert_close(fast(x, mask), model(x, mask), equal_nan=True)


def test_weights_of_a_transposed_convolution_that_change() -> None:
    model = Applied(lambda x, n: F.conv_transpose1d(x, n, stride=2))
    x = torch.randn(2, 4, 9)
    fast = intarsia.compile(model, (x, torch.randn(4, 3, 5)), engines=["openvino"], min_block_size=1)
    for weight in (torch.randn(4, 3, 5), torch.zeros(4, 3, 5)):
        torch.testing.assert_close(fast(x, weight), model(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arm", [False, True])
@pytest.mark.parametrize("kind", [nn.SiLU, nn.ReLU, nn.Sigmoid])
def test_a_convolution_computes_its_own_silu(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], arm: bool
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(runtime, "is_arm", lambda: arm)
    monkeypatch.setattr(runtime, "core", lambda: _Noting(core(), seen))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), kind()).eval()
    x = torch.randn(1, 3, 12, 12)
    fast = intarsia.compile(model, (x,), engines=["openvino"], partition="dependency")
    assert fast.plan.engines == ("openvino",) and seen
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    without = [config.get("SNIPPETS_MODE") == "DISABLE" for config in seen]
    assert all(without) if arm and kind is nn.SiLU else not any(without)


class _Noting:
    def __init__(self, core: Any, seen: list[dict[str, str]]) -> None:
        self._core, self._seen = core, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def compile_model(self, model: Any, device: str, config: dict[str, str]) -> Any:
        self._seen.append(config)
        return self._core.compile_model(model, device, config)


def test_a_snippet_without_registers_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        def compile_model(self, model: str, device: str, config: dict[str, str]) -> dict[str, str]:
            if model == "large" and config.get("SNIPPETS_MODE") != "DISABLE":
                raise RuntimeError("Can't allocate registers for a snippet: not enough registers")
            if model == "broken":
                raise RuntimeError("Broken")
            return config

    monkeypatch.setattr(runtime, "core", Core)
    assert runtime.compile_model("large", {"NUM_STREAMS": "1"}) == {
        "NUM_STREAMS": "1",
        "SNIPPETS_MODE": "DISABLE",
    }
    assert runtime.compile_model("small", {"NUM_STREAMS": "1"}) == {"NUM_STREAMS": "1"}
    with pytest.raises(RuntimeError, match="Broken"):
        runtime.compile_model("broken", {})
