"""Convolution with the batch norm and the activation after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.shapes import MICROSOFT
from intarsia.rewrite.fusions.fusion import Fusion, given, is_float, scaled_to, weight
from intarsia.rewrite.pattern import refuse
from intarsia.rewrite.rule import rule


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
    """A batch norm of known statistics is a scale and a shift of the convolution's weight and bias."""
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


FUSIONS = (
    Fusion("conv_batch_norm", conv_batch_norm, _batch_norm_written, 65, free=True),
    Fusion("conv_relu", conv_relu, _relu_written, 20, group=MICROSOFT),
)
