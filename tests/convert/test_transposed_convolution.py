"""Transposed convolutions: an output padding up to the dilation, and weights that are no numbers."""

from __future__ import annotations

import math

import pytest
import torch
from tests.convert import drivers
from tests.convert.one_node import answers

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
