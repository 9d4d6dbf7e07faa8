"""The gradients that core ATen counts as operators answer as eager's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.convert.equal import assert_equal

aten = torch.ops.aten
torch.manual_seed(0)
IMAGE = torch.randn(2, 4, 9, 8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (2, 1, 2), (3, 2, 1)])
def test_convolution(transposed: bool, groups: int, stride: int, padding: int, dilation: int) -> None:
    weight = torch.randn(4, 6 // groups, 3, 3) if transposed else torch.randn(6, 4 // groups, 3, 3)
    rest = [[stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups]
    made = aten.convolution(IMAGE, weight, None, *rest)
    grad = torch.randn_like(made)

    def gradients(grad: Any, image: Any, weight: Any) -> Any:
        return aten.convolution_backward(grad, image, weight, [6], *rest, [True, True, True])

    assert_equal(gradients, (grad, IMAGE, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("divisor", [None, 3])
def test_average_pooling(ceil: bool, include: bool, divisor: int | None) -> None:
    rest = ([3, 2], [2, 2], [1, 1], ceil, include, divisor)
    grad = torch.randn_like(aten.avg_pool2d(IMAGE, *rest))
    assert_equal(lambda g, x: aten.avg_pool2d_backward(g, x, *rest), (grad, IMAGE))


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (4, 5)])
def test_adaptive_average_pooling(size: tuple[int, int]) -> None:
    grad = torch.randn(2, 4, *size)
    assert_equal(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), (grad, IMAGE))


def test_max_pooling() -> None:
    rest = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    values, indices = aten.max_pool2d_with_indices(IMAGE, *rest)
    grad = torch.randn_like(values)
    assert_equal(
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, *rest, i), (grad, IMAGE, indices)
    )


def test_layer_norm() -> None:
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)

    def gradients(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return aten.native_layer_norm_backward(grad, x, [8], mean, rstd, weight, bias, [True, True, True])

    assert_equal(gradients, (torch.randn_like(x), x, mean, rstd, weight, bias))


def test_group_norm() -> None:
    weight, bias = torch.randn(4), torch.randn(4)
    _, mean, rstd = aten.native_group_norm(IMAGE, weight, bias, 2, 4, 72, 2, 1e-5)

    def gradients(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Any:
        return aten.native_group_norm_backward(grad, x, mean, rstd, weight, 2, 4, 72, 2, [True, True, True])

    assert_equal(gradients, (torch.randn_like(IMAGE), IMAGE, mean, rstd, weight))
