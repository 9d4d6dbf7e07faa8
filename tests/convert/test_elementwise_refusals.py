"""What elementwise converters do not take, they refuse with a sentence that holds the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert.one_node import network_of

from intarsia.errors import IntarsiaError

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
