"""Transposed convolutions and batch norms: padding up to the dilation, weights that are no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.convert import drivers
from tests.convert.programs import answers, assert_equal

from intarsia.cache.machine import is_arm
from intarsia.errors import EngineError, GuardError

aten = torch.ops.aten


@pytest.mark.parametrize("engine", drivers.ENGINES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("stride", "padding", "extra", "dilation"), [
    ([1, 1], [2, 1], [1, 1], [2, 2]),  # less is cut off
    ([1, 2], [0, 1], [2, 2], [3, 3]),  # nothing is, and there are zeros
    ([2, 2], [1, 1], [1, 0], [1, 1]),  # below the stride
])  # fmt: skip
@pytest.mark.parametrize("weight", [0.5, math.nan, math.inf])
def test_output_padding(
    engine: str,
    bias: bool,
    stride: list[int],
    padding: list[int],
    extra: list[int],
    dilation: list[int],
    weight: float,
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 2)
    w[1, 2, 0, 1] = weight
    shift = torch.randn(6) if bias else None
    call = (x, w, shift, stride, padding, extra, 2, dilation)
    try:
        answer, expected = answers(aten.conv_transpose2d.input, *call, engine=engine)
    except GuardError:
        assert not math.isfinite(weight) and engine == "openvino", "only such weights are left to PyTorch"
        return
    except EngineError:
        assert is_arm() and engine == "openvino", "it reads weights that are inputs but once there"
        return
    torch.testing.assert_close(answer, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


# Batch norm as graphs spell it: by given statistics, by the batch's own, and returning new ones.


torch.manual_seed(0)
IMAGE = torch.randn(3, 4, 5, 6)
WEIGHT, BIAS, MEAN, VARIANCE = torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5


@pytest.mark.parametrize("training", [True, False])
def test_returning_new_statistics(training: bool) -> None:
    def function(x: Any, w: Any, b: Any, mean: Any, variance: Any) -> Any:
        return aten._native_batch_norm_legit_functional(x, w, b, mean, variance, training, 0.1, 1e-5)

    assert_equal(function, (IMAGE, WEIGHT, BIAS, MEAN, VARIANCE))


def test_by_the_batch_itself() -> None:
    assert_equal(
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
        (IMAGE, WEIGHT, BIAS),
    )


def test_by_given_statistics() -> None:
    def function(x: Any, w: Any, b: Any, mean: Any, variance: Any) -> Any:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, variance, 0.1, 1e-5)[0]

    assert_equal(function, (IMAGE, WEIGHT, BIAS, MEAN, VARIANCE))
    assert_equal(function, (IMAGE[..., 0, 0].contiguous(), WEIGHT, BIAS, MEAN, VARIANCE))
