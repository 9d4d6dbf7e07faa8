"""Norms from their fragments, also with the residual sum before them."""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.network.value import MICROSOFT
from intarsia.rewrite.fusions.fusion import Fusion, given, integers, scalar, weight
from intarsia.rewrite.pattern import Refusal, refuse, rule


def _square(op: Any, x: Any) -> Any:
    return op.either(op.Pow(x, 2.0), op.Mul(x, x))


def _mean(op: Any, x: Any, axes: Any, count: Any) -> Any:
    return op.either(
        op.ReduceMean(x, op.constant(axes)),
        op.Div(op.ReduceSum(x, op.constant(axes)), op.constant(count)),
    )


def _centred(op: Any, x: Any, axes: Any, eps: Any, count: Any) -> tuple[Any, Any]:
    """x minus its mean, and the root of its variance."""
    centred = op.Sub(x, op.ReduceMean(x, op.constant(axes)))
    variance = _mean(op, _square(op, centred), axes, count)
    return centred, op.Sqrt(op.Add(variance, op.constant(eps)))


def _ratio(op: Any, top: Any, root: Any) -> Any:
    over = op.either(op.Reciprocal(root), op.Div(1.0, root))
    return op.either(op.Div(top, root), op.Mul(top, over))


def _scaled(op: Any, x: Any, w: Any, axes: Any, eps: Any, count: Any) -> Any:
    centred, root = _centred(op, x, axes, eps, count)
    over = op.either(op.Reciprocal(root), op.Div(1.0, root))
    whole = op.Mul(centred, w)
    return op.either(op.Mul(_ratio(op, centred, root), w), op.Div(whole, root), op.Mul(whole, over))


def _affine(op: Any, x: Any, w: Any, b: Any, axes: Any, eps: Any, count: Any) -> Any:
    return op.Add(_scaled(op, x, w, axes, eps, count), b)


def _plain(op: Any, x: Any, axes: Any, eps: Any, count: Any) -> Any:
    return _ratio(op, *_centred(op, x, axes, eps, count))


def _axis(x: Tensor, axes: Tensor, count: Tensor | None) -> int | Refusal:
    """The first axis of the norm; a refusal if its axes are not the last ones."""
    dims = sorted(axis % x.ndim for axis in integers(axes) or ())
    if not dims or dims != list(range(x.ndim - len(dims), x.ndim)):
        return refuse(f"it works over axes {dims} of {x.ndim}, not over the last ones")
    sizes = x.shape[dims[0] :]
    if count is not None and (
        not all(isinstance(d, int) for d in sizes) or scalar(count) != float(np.prod(sizes))  # type: ignore[arg-type]
    ):
        return refuse(f"the sum over {list(sizes)} is divided by {scalar(count)}")
    return dims[0]


def _fits(x: Tensor, w: Tensor, axis: int) -> bool:
    return w.shape == x.shape[axis:] and all(isinstance(d, int) for d in w.shape)


def _epsilon(eps: Tensor) -> float | Refusal:
    number = scalar(eps)
    return refuse(f"epsilon is {list(eps.shape)}, not one number") if number is None else number


def _normed(
    x: Tensor, w: Tensor | None, b: Tensor | None, axes: Tensor, eps: Tensor, count: Tensor | None
) -> object:
    axis, epsilon = _axis(x, axes, count), _epsilon(eps)
    if isinstance(axis, Refusal) or isinstance(epsilon, Refusal):
        return axis if isinstance(axis, Refusal) else epsilon
    sizes = x.shape[axis:]
    for name, tensor in (("weight", w), ("bias", b)):
        if tensor is not None and not _fits(x, tensor, axis):
            return refuse(f"the {name} is {list(tensor.shape)}, not {list(sizes)}")
    if w is None:
        if not all(isinstance(d, int) for d in sizes):
            return refuse(f"the sizes {list(sizes)} are not known")
        w = F.constant(np.ones(sizes, np.float32), x.dtype)
    return F.layer_norm(x, w, b, axis=axis - x.ndim, epsilon=epsilon)


@rule(_affine)
def layer_norm(
    net: Network, x: Tensor, w: Tensor, b: Tensor, axes: Tensor, eps: Tensor, count: Tensor | None
) -> object:
    """(x - mean) / sqrt(variance + eps) * w + b."""
    return _normed(x, w, b, axes, eps, count)


@rule(_scaled)
def layer_norm_scaled(
    net: Network, x: Tensor, w: Tensor, axes: Tensor, eps: Tensor, count: Tensor | None
) -> object:
    """(x - mean) / sqrt(variance + eps) * w."""
    return _normed(x, w, None, axes, eps, count)


@rule(_plain)
def layer_norm_plain(net: Network, x: Tensor, axes: Tensor, eps: Tensor, count: Tensor | None) -> object:
    """(x - mean) / sqrt(variance + eps)."""
    return _normed(x, None, None, axes, eps, count)


def _fragments(x: Tensor, way: int) -> Tensor:
    last = x.ndim - 1
    centred = x - F.reduce_mean(x, [last])
    square = F.pow(centred, 2.0) if way % 2 else centred * centred
    root = F.sqrt(F.reduce_mean(square, [last]) + 1e-5)
    return centred / root if way < 2 else centred * F.reciprocal(root)


def _layer_norm_written(rng: np.random.Generator, large: bool) -> None:
    width = 768 if large else int(rng.integers(2, 6))
    x = given("x", *((1, 128, width) if large else (2, "n", width)))
    w, b = weight(rng, width, shift=1.0), weight(rng, width)
    (_fragments(x, int(rng.integers(4))) * w + b).mark_output("y")


def _scaled_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((1, 128, 768) if large else (2, "n", 5)))
    (_fragments(x, int(rng.integers(4))) * weight(rng, 768 if large else 5, shift=1.0)).mark_output("y")


def _plain_written(rng: np.random.Generator, large: bool) -> None:
    x = given("x", *((1, 128, 768) if large else (2, "n", 5)))
    _fragments(x, int(rng.integers(4))).mark_output("y")


def _root_mean(op: Any, x: Any, w: Any, axes: Any, eps: Any) -> Any:
    root = op.Sqrt(op.Add(op.ReduceMean(_square(op, x), op.constant(axes)), op.constant(eps)))
    return op.Mul(_ratio(op, x, root), w)


@rule(_root_mean)
def rms_norm(net: Network, x: Tensor, w: Tensor, axes: Tensor, eps: Tensor) -> object:
    """x / sqrt(mean(x ** 2) + eps) * w."""
    axis, epsilon = _axis(x, axes, None), _epsilon(eps)
    if isinstance(axis, Refusal) or isinstance(epsilon, Refusal):
        return axis if isinstance(axis, Refusal) else epsilon
    if not _fits(x, w, axis):
        return refuse(f"the weight is {list(w.shape)}, not {list(x.shape[axis:])}")
    return F.rms_norm(x, w, axis=axis - x.ndim, epsilon=epsilon)


def _rms_written(rng: np.random.Generator, large: bool) -> None:
    width = 1024 if large else int(rng.integers(2, 6))
    x = given("x", *((1, 128, width) if large else (2, "n", width)))
    square = F.pow(x, 2.0) if rng.integers(2) or large else x * x
    root = F.sqrt(F.reduce_mean(square, [2]) + 1e-6)
    y = x * F.reciprocal(root) if rng.integers(2) or large else x / root
    (weight(rng, width, shift=1.0) * y).mark_output("y")


def _grouped(op: Any, x: Any, sizes: Any, back: Any, ones: Any, zeros: Any, w: Any, b: Any) -> Any:
    inner = op.Reshape(x, op.constant(sizes))
    normed = op.either(
        op.InstanceNormalization(inner, op.constant(ones), op.constant(zeros), epsilon=op.any, _name="norm"),
        op.LayerNormalization(inner, op.constant(ones), epsilon=op.any, _name="layer"),
    )
    return op.Add(op.Mul(op.Reshape(normed, op.constant(back)), op.constant(w)), op.constant(b))


@rule(_grouped)
def group_norm(
    net: Network,
    x: Tensor,
    ones: Tensor,
    zeros: Tensor | None,
    w: Tensor,
    b: Tensor,
    norm: Layer | None,
    layer: Layer | None,
) -> object:
    """A group norm: channels in groups, normalized, and scaled per channel."""
    inside = norm if norm is not None else layer
    assert (
        inside is not None and ones.constant is not None and w.constant is not None and b.constant is not None
    )
    folded = inside.get_inputs(0)[0]
    assert folded is not None
    if (
        x.ndim < 3
        or folded.ndim != 3
        or not isinstance(x.shape[1], int)
        or not isinstance(folded.shape[1], int)
    ):
        return refuse(f"{list(x.shape)} is regrouped as {list(folded.shape)}")
    channels, groups = x.shape[1], folded.shape[1]
    if channels % groups or folded.shape[0] != x.shape[0] or None in (folded.shape[0], x.shape[0]):
        return refuse(f"{list(x.shape)} is regrouped as {list(folded.shape)}")
    if not np.all(ones.constant == 1) or (zeros is not None and np.any(zeros.constant)):
        return refuse("the groups are scaled before the channels are")
    flat = []
    for tensor in (w, b):
        wide = (1,) * (x.ndim - tensor.ndim) + tensor.constant.shape  # type: ignore[union-attr]
        if wide != (1, channels, *[1] * (x.ndim - 2)):
            return refuse(f"{list(tensor.shape)} is not one number a channel")
        flat.append(F.constant(np.ascontiguousarray(tensor.constant.reshape(channels))))  # type: ignore[union-attr]
    return F.group_norm(x, flat[0], flat[1], groups, float(inside.attribute("epsilon", 1e-5)))


def _group_norm_written(rng: np.random.Generator, large: bool) -> None:
    batch, channels, side = (1, 64, 32) if large else (2, 6, 3)
    x = given("x", batch, channels, side, side)
    inner = F.reshape(x, (batch, 2, -1))
    if rng.integers(2) or large:
        normed = F.instance_norm(inner, np.ones(2, np.float32), np.zeros(2, np.float32), 1e-5)
    else:
        normed = F.layer_norm(inner, np.ones(channels // 2 * side * side, np.float32), None)
    back = F.reshape(normed, (batch, channels, side, side))
    (back * weight(rng, channels, 1, 1, shift=1.0) + weight(rng, 1, channels, 1, 1)).mark_output("y")


def _after_sum(op: Any, x: Any, skip: Any, w: Any, b: Any) -> Any:
    total = op.Add(x, skip)
    return op.LayerNormalization(total, w, b, axis=-1, epsilon=op.any, _name="norm"), total


@rule(_after_sum)
def residual_norm(net: Network, x: Tensor, skip: Tensor, w: Tensor, b: Tensor, norm: Layer) -> object:
    """The residual sum and the norm after it. The sum is a result too, for its other readers."""
    if x.shape != skip.shape or x.ndim not in (2, 3) or None in x.shape:
        return refuse(f"the sum is of {list(x.shape)} and {list(skip.shape)}")
    if w.ndim != 1 or b.ndim != 1:
        return refuse(f"weight {list(w.shape)} and bias {list(b.shape)} are not vectors")
    epsilon = float(norm.attribute("epsilon", 1e-5))
    results = F.ops("SkipLayerNormalization", x, skip, w, b, outputs=4, domain=MICROSOFT, epsilon=epsilon)
    return results[0], results[3]


def _residual_written(rng: np.random.Generator, large: bool) -> None:
    width = 768 if large else 6
    shape = (1, 128, width) if large else (2, 3, width)
    x, skip = given("x", *shape), given("skip", *shape)
    total = x + skip
    y = F.layer_norm(total, weight(rng, width, shift=1.0), weight(rng, width))
    (F.relu(total) + y if rng.integers(2) or large else y).mark_output("y")


FUSIONS = (
    Fusion("layer_norm", layer_norm, _layer_norm_written, 64),
    Fusion("layer_norm_scaled", layer_norm_scaled, _scaled_written, 63),
    Fusion("layer_norm_plain", layer_norm_plain, _plain_written, 62),
    Fusion("rms_norm", rms_norm, _rms_written, 60),
    Fusion("group_norm", group_norm, _group_norm_written, 45),
    Fusion("residual_norm", residual_norm, _residual_written, 30, group=MICROSOFT),
)
