"""Batch norm as graphs spell it: by given statistics, by the batch's own, and returning new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert.equal import assert_equal

aten = torch.ops.aten
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
