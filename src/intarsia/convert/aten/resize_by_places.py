"""Resizing along an axis whose sizes are known only at run time: places and weights are computed there."""

from __future__ import annotations

import onnx_ir as ir

from intarsia.convert.aten.sizes import Size, int64, size
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

FLOAT = ir.DataType.FLOAT
_A = -0.75  # torch's cubic coefficient


def nearest_places(x: Tensor, axis: int, goal: Size, exact: bool, scale: float | None) -> Tensor:
    """Which element torch takes for each element of the result."""
    extent = size(x, axis)
    step = _step(extent, goal, scale)
    place = _numbers(goal)
    place = F.floor(F.mul(F.add(place, 0.5) if exact else place, step))
    return F.cast(_held(place, extent), ir.DataType.INT64)


def resized(x: Tensor, axis: int, mode: str, goal: Size, align: bool, scale: float | None) -> Tensor:
    """`x` resized along one axis, linear or cubic, in torch's order of operations."""
    if mode not in ("linear", "cubic"):
        raise ConversionError(f"resizing by {mode} to a size not known ahead is not handled")
    extent = size(x, axis)
    if align:
        last, end = _float(extent + -1), _float(goal + -1)
        # Of one element there is no next, and its place is 0 whatever the step.
        step = F.div(last, F.maximum(end, F.constant(1.0, FLOAT)))
        place = F.mul(_numbers(goal), step)
    else:
        place = F.sub(F.mul(F.add(_numbers(goal), 0.5), _step(extent, goal, scale)), 0.5)
    if mode == "linear":
        place = F.maximum(place, F.constant(0.0, FLOAT))
    first = F.floor(place)
    past = F.sub(place, first)
    weights = [F.sub(F.constant(1.0, FLOAT), past), past] if mode == "linear" else _cubic(past)
    total: Tensor | None = None
    for tap, weight in enumerate(weights, start=0 if mode == "linear" else -1):
        at = F.cast(_held(F.add(first, float(tap)), extent), ir.DataType.INT64)
        shaped = F.reshape(F.cast(weight, x.dtype), [-1] + [1] * (x.ndim - 1 - axis))
        term = F.mul(F.gather(x, at, axis), shaped)
        total = term if total is None else F.add(total, term)
    assert total is not None
    return total


def _cubic(t: Tensor) -> list[Tensor]:
    """What the four neighbours weigh."""

    def near(x: Tensor) -> Tensor:  # ((A + 2) x - (A + 3)) x x + 1
        return F.add(F.mul(F.mul(F.sub(F.mul(x, _A + 2), _A + 3), x), x), 1.0)

    def far(x: Tensor) -> Tensor:  # ((A x - 5 A) x + 8 A) x - 4 A
        return F.sub(F.mul(F.add(F.mul(F.sub(F.mul(x, _A), 5 * _A), x), 8 * _A), x), 4 * _A)

    rest = F.sub(F.constant(1.0, FLOAT), t)
    return [far(F.add(t, 1.0)), near(t), near(rest), far(F.add(rest, 1.0))]


def _step(extent: Size, goal: Size, scale: float | None) -> Tensor:
    """How far apart neighbours of the result lie: by the scale that is given, or by both sizes."""
    return F.constant(1.0 / scale, FLOAT) if scale else F.div(_float(extent), _float(goal))


def _held(place: Tensor, extent: Size) -> Tensor:
    inside = F.minimum(place, _float(extent + -1))
    return F.maximum(inside, F.constant(0.0, FLOAT))


def _float(value: Size) -> Tensor:
    return F.cast(int64(value), FLOAT)


def _numbers(goal: Size) -> Tensor:
    return F.cast(F.arange(0, goal, 1, ir.DataType.INT64), FLOAT)
