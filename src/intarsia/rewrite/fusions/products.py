"""Patterns of products: convolutions and matrices with the layers around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.value import MICROSOFT
from intarsia.rewrite.fusions.fusion import Fusion, given, is_float, scalar, scaled_to, weight
from intarsia.rewrite.pattern import refuse, rule

# Convolutions, with the batch norm and the activation after them.


def _conv(op: Any, x: Any, w: Any, b: Any) -> Any:
    return op.Conv(x, op.constant(w), op.maybe(op.constant(b)), _any_attributes=True, _name="conv")


def _normed(op: Any, x: Any, w: Any, b: Any, scale: Any, shift: Any, mean: Any, var: Any) -> Any:
    constants = [op.constant(t) for t in (scale, shift, mean, var)]
    return op.BatchNormalization(
        _conv(op, x, w, b), *constants, epsilon=op.any, momentum=op.any, _name="norm"
    )


@rule(_normed)
def conv_batch_norm(
    net: Network,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    var: Tensor,
    conv: Layer,
    norm: Layer,
) -> object:
    """A convolution whose weight and bias contain the batch norm after it."""
    if not is_float(w):
        return refuse(f"scaling a weight of {w.dtype.name} would round it")
    assert w.constant is not None
    s, h, m, v = (np.asarray(t.constant, np.float64) for t in (scale, shift, mean, var))
    factor = s / np.sqrt(v + float(norm.attribute("epsilon", 1e-5)))
    bias = np.zeros_like(m) if b is None or b.constant is None else np.asarray(b.constant, np.float64)
    new = scaled_to(w.constant, factor.reshape(-1, *[1] * (w.constant.ndim - 1)))
    with np.errstate(over="ignore"):
        moved = ((bias - m) * factor + h).astype(w.constant.dtype)
    if new is None or not np.isfinite(moved).all():
        return refuse(f"scaled by the norm, its weight or bias leaves {w.dtype.name}")
    return F.op(
        "Conv",
        x,
        F.constant(new),
        F.constant(moved),
        **{name: conv.attribute(name) for name in conv.node.attributes},
    )


def _conv_written(rng: np.random.Generator, large: bool) -> Tensor:
    channels, out, side = (32, 64, 28) if large else (2, int(rng.integers(1, 5)), 5)
    x = given("x", 1, channels, side, side)
    bias = weight(rng, out) if rng.integers(2) or large else None
    ones = (1, 1)
    w = weight(rng, out, channels, 3, 3, scale=0.1)
    return F.conv(x, w, bias, strides=ones, pads=(1, 1, 1, 1), dilations=ones)


def _batch_norm_written(rng: np.random.Generator, large: bool) -> None:
    y = _conv_written(rng, large)
    out = int(y.shape[1])  # type: ignore[arg-type]
    scale, shift, mean = weight(rng, out, shift=1.0), weight(rng, out), weight(rng, out)
    variance = F.constant(rng.uniform(0.2, 2, out).astype(np.float32))
    F.relu(F.batch_norm(y, scale, shift, mean, variance, 1e-5)).mark_output("y")


@rule(lambda op, x, w, b: op.Relu(_conv(op, x, w, b)))
def conv_relu(net: Network, x: Tensor, w: Tensor, b: Tensor | None, conv: Layer) -> object:
    """A convolution and the relu after it."""
    result = conv.get_outputs(0)[0]
    attributes = {name: conv.attribute(name) for name in conv.node.attributes}
    inputs = [x, w] if b is None else [x, w, b]
    out = (result.dtype, result.shape)
    return F.opaque(MICROSOFT, "FusedConv", *inputs, makes=[out], activation="Relu", **attributes)[0]


def _relu_written(rng: np.random.Generator, large: bool) -> None:
    F.relu(_conv_written(rng, large)).mark_output("y")


# Matrix products: with a bias, with a scale in the weight, merged projections, and the choice of a kernel.


@rule(lambda op, x, w, b: op.Add(op.MatMul(x, w), b))
def linear_bias(net: Network, x: Tensor, w: Tensor, b: Tensor) -> object:
    """A Gemm for a product of matrices and the sum after it."""
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
    """A product with a scaled weight, for a scaled product."""
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
    """One linear layer and a split, for three linear layers of one input (query, key, value)."""
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


_ROWS, _WEIGHTS = 64, 512 * 512  # MLAS computes smaller products as fast, or faster


@rule(lambda op, x, w, b: op.Gemm(x, op.constant(w), op.maybe(b), transB=op.any, _name="gemm"))
def onednn_product(net: Network, x: Tensor, w: Tensor, b: Tensor | None, gemm: Layer) -> object:
    """A large product with an activation that changes nothing.

    Engines of the group "onednn" use oneDNN for a product that an activation follows, and otherwise MLAS.
    Which of the two is faster depends on the processor.
    """
    # An activation after a reshape is not seen here; then this one costs little.
    if any(layer.kind == "LeakyRelu" for layer in gemm.get_outputs(0)[0].get_users()):
        return refuse("an activation follows")
    rows = x.shape[0]
    if not isinstance(rows, int) or rows < _ROWS:
        return refuse(f"the input has {rows} rows; the rewrite needs {_ROWS} to be faster")
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
    Fusion("conv_batch_norm", conv_batch_norm, _batch_norm_written, 65, free=True),
    Fusion("conv_relu", conv_relu, _relu_written, 20, group=MICROSOFT),
    Fusion("linear_bias", linear_bias, _with_bias, 30),
    Fusion("scale_into_weight", scale_into_weight, _scaled, 35),
    Fusion("merged_projections", merged_projections, _projections, 25),
    Fusion("onednn_product", onednn_product, _followed_by_nothing, 1, group="onednn"),
)
