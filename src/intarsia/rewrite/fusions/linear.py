"""Matrix products: bias taken in, scale folded into the weight, projections merged, a kernel asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.rewrite.fusions.fusion import Fusion, given, is_float, scalar, scaled_to, weight
from intarsia.rewrite.pattern import refuse
from intarsia.rewrite.rule import rule


@rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
def linear_bias(net: Network, x: Tensor, w: Tensor, b: Tensor) -> object:
    """A product of matrices and the sum after it are one Gemm."""
    if x.ndim != 2 or w.ndim != 2:
        return refuse(f"the product is of {x.ndim} and {w.ndim} dimensions, not of matrices")
    if b.ndim != 1 or b.shape[0] != w.shape[1] or not isinstance(b.shape[0], int):
        return refuse(f"the bias is {list(b.shape)}, not [{w.shape[1]}]")
    return F.gemm(x, w, b)


def _with_bias(rng: np.random.Generator, large: bool) -> None:
    rows, inner, columns = (256, 512, 512) if large else (int(rng.integers(1, 4)), 3, 5)
    x = given("x", rows, inner)
    (F.matmul(x, weight(rng, inner, columns)) + weight(rng, columns)).mark_output("y")


@rule(
    lambda op, x, w, b, k: op.either(
        op.Mul(op.MatMul(x, op.constant(w)), op.constant(k)),
        op.Div(op.MatMul(x, op.constant(w)), op.constant(k), _name="division"),
        op.Mul(
            op.Gemm(x, op.constant(w), op.maybe(op.constant(b)), transB=op.any, _name="gemm"), op.constant(k)
        ),
    )
)
def scale_into_weight(
    net: Network,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    k: Tensor,
    division: Layer | None,
    gemm: Layer | None,
) -> object:
    """A product scaled by a number is a product by the scaled weight."""
    number = scalar(k)
    if number is None or k.ndim > 2:
        return refuse(f"the scale is {list(k.shape)}, not one number")
    if not is_float(w):
        return refuse(f"scaling a weight of {w.dtype.name} would round it")
    if division is not None:
        if number == 0:
            return refuse("it divides by zero")
        number = 1 / number
    assert w.constant is not None
    scaled = scaled_to(w.constant, number)
    bias = None if b is None or b.constant is None else scaled_to(b.constant, number)
    if scaled is None or (b is not None and bias is None):
        return refuse(f"scaled by {number:g}, its weight or bias leaves {w.dtype.name}")
    if gemm is None:
        return F.matmul(x, F.constant(scaled))
    trans_b = bool(gemm.attribute("transB", 0))
    return F.gemm(x, F.constant(scaled), None if bias is None else F.constant(bias), trans_b=trans_b)


def _scaled(rng: np.random.Generator, large: bool) -> None:
    rows, inner, columns = (256, 512, 512) if large else (2, 3, 5)
    x = given("x", rows, inner)
    y = F.gemm(x, weight(rng, columns, inner), weight(rng, columns), trans_b=True) * 0.125
    (y + F.matmul(x, weight(rng, inner, columns)) / 4.0).mark_output("y")


def _three(op: Any, x: Any, u: Any, v: Any, w: Any, a: Any, b: Any, c: Any) -> Any:
    return tuple(
        op.Gemm(x, op.constant(m), op.maybe(op.constant(n)), transB=1) for m, n in ((u, a), (v, b), (w, c))
    )


@rule(_three)
def merged_projections(
    net: Network,
    x: Tensor,
    u: Tensor,
    v: Tensor,
    w: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
) -> object:
    """Three linear layers of one input (query, key, value) are one, cut in three."""
    weights, biases = [u.constant, v.constant, w.constant], [a, b, c]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        return refuse("some have a bias and some have none")
    if any(bias is not None and bias.ndim != 1 for bias in biases):
        return refuse("a bias is no vector")
    sizes = [int(array.shape[0]) for array in weights if array is not None]
    if any(t is not None and t.shape[0] != n for t, n in zip(biases, sizes, strict=True)):
        return refuse("a bias is broadcast")
    bias = None if a is None else F.constant(np.concatenate([t.constant for t in biases if t is not None]))
    merged = F.constant(np.concatenate([array for array in weights if array is not None]))
    return F.split(F.gemm(x, merged, bias, trans_b=True), sizes, axis=1)


def _projections(rng: np.random.Generator, large: bool) -> None:
    rows, inner, columns = (256, 512, 512) if large else (2, 3, 4)
    x = given("x", rows, inner)
    biased = bool(rng.integers(2)) or large
    for name in "qkv":
        width = columns if name == "q" or large else 2
        bias = weight(rng, width) if biased else None
        F.gemm(x, weight(rng, width, inner), bias, trans_b=True).mark_output(name)


_ROWS, _WEIGHTS = 64, 512 * 512  # smaller products run as fast by MLAS, or faster


@rule(lambda op, x, w, b: op.Gemm(x, op.constant(w), op.maybe(b), transB=op.any, _name="gemm"))
def onednn_product(net: Network, x: Tensor, w: Tensor, b: Tensor | None, gemm: Layer) -> object:
    """A large product is followed by an activation that changes nothing.

    Engines of the group "onednn" multiply by MLAS where nothing follows a product, and by oneDNN where
    something does; which of the two is faster depends on the processor.
    """
    # Another activation may stand behind a reshape; where one follows anyway, this one costs little.
    if any(layer.kind == "LeakyRelu" for layer in gemm.get_outputs(0)[0].get_users()):
        return refuse("an activation follows")
    rows = x.shape[0]
    if not isinstance(rows, int) or rows < _ROWS:
        return refuse(f"the input has {rows} rows, of {_ROWS} that it takes to gain")
    if not is_float(w):
        return refuse(f"the weight is of {w.dtype.name}, which MLAS does not multiply")
    if w.constant is None or w.constant.size < _WEIGHTS:
        return refuse(f"the weight is {list(w.shape)}, too small to gain")
    return F.leaky_relu(F.gemm(x, w, b, trans_b=bool(gemm.attribute("transB", 0))), 1.0)


def _followed_by_nothing(rng: np.random.Generator, large: bool) -> None:
    rows, inner, columns = (256, 2048, 768) if large else (64, 512, 512)
    F.gemm(
        given("x", rows, inner), weight(rng, columns, inner), weight(rng, columns), trans_b=True
    ).mark_output("y")


FUSIONS = (
    Fusion("linear_bias", linear_bias, _with_bias, 30),
    Fusion("scale_into_weight", scale_into_weight, _scaled, 35),
    Fusion("merged_projections", merged_projections, _projections, 25),
    Fusion("onednn_product", onednn_product, _followed_by_nothing, 1, group="onednn"),
)
