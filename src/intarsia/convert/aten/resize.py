"""Resizing of images: nearest, linear and cubic, with torch's coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.convert.aten.kernels import is_float, static, wide
from intarsia.convert.aten.sizes import Size, floor_divide, int64, size
from intarsia.convert.context import HALVES, Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor, dtypes
from intarsia.network import functional as F

aten = torch.ops.aten

# Along an axis whose sizes are known only at run time, places and weights are computed there.

FLOAT = ir.DataType.FLOAT


def nearest_places(x: Tensor, axis: int, goal: Size, exact: bool, scale: float | None) -> Tensor:
    """Which element torch takes for each element of the result."""
    extent = size(x, axis)
    step = _step(extent, goal, scale)
    place = _numbers(goal)
    place = F.floor(F.mul(F.add(place, 0.5) if exact else place, step))
    return F.cast(_held(place, extent), ir.DataType.INT64)


def resized(x: Tensor, axis: int, goal: Size, align: bool, scale: float | None) -> Tensor:
    """`x` resized along one axis, linear, in torch's order of operations."""
    extent = size(x, axis)
    if align:
        last, end = _float(extent + -1), _float(goal + -1)
        # Of one element there is no next, and its place is 0 whatever the step.
        step = F.div(last, F.maximum(end, F.constant(1.0, FLOAT)))
        place = F.mul(_numbers(goal), step)
    else:
        place = F.sub(F.mul(F.add(_numbers(goal), 0.5), _step(extent, goal, scale)), 0.5)
    place = F.maximum(place, F.constant(0.0, FLOAT))
    first = F.floor(place)
    past = F.sub(place, first)
    terms = []
    for tap, weight in enumerate((F.sub(F.constant(1.0, FLOAT), past), past)):
        at = F.cast(_held(F.add(first, float(tap)), extent), ir.DataType.INT64)
        shaped = F.reshape(F.cast(weight, x.dtype), [-1] + [1] * (x.ndim - 1 - axis))
        terms.append(F.mul(F.gather(x, at, axis), shaped))
    return F.add(*terms)


def _step(extent: Size, goal: Size, scale: float | None) -> Tensor:
    """The distance between neighbours of the result: from the scale argument, or from both sizes."""
    return F.constant(1.0 / scale, FLOAT) if scale else F.div(_float(extent), _float(goal))


def _held(place: Tensor, extent: Size) -> Tensor:
    inside = F.minimum(place, _float(extent + -1))
    return F.maximum(inside, F.constant(0.0, FLOAT))


def _float(value: Size) -> Tensor:
    return F.cast(int64(value), FLOAT)


def _numbers(goal: Size) -> Tensor:
    return F.cast(F.arange(0, goal, 1, ir.DataType.INT64), FLOAT)


# Along axes of known sizes.

Array = np.ndarray[Any, Any]
Scales = Sequence[float | None]


def _goal(x: Tensor, output_size: Any, scales: Sequence[float | None]) -> list[Any]:
    """The requested sizes: the argument, or the input's sizes times the scale, rounded down as in torch."""
    if output_size is not None:
        return list(output_size)
    goal = []
    for i, scale in enumerate(scales):
        size = x.shape[2 + i]
        if scale is None:
            raise ConversionError("neither a size nor a scale is passed")
        goal.append(math.floor(size * scale) if isinstance(size, int) else None)
    return goal


def _scaled(x: Tensor, axis: int, scale: float | None) -> Size:
    """A size that is known at run time times a scale, rounded down, in integers."""
    exact = Fraction(scale or 1.0)
    if exact.denominator > 1024:
        raise ConversionError(f"resizing by a factor of {scale} needs sizes known at compile time")
    extent = F.mul(int64(size(x, axis)), int64(exact.numerator))
    return floor_divide(extent, exact.denominator) if exact.denominator > 1 else extent


def _weights(
    x: Tensor, mode: str, size: int, goal: int, align: bool, scale: float | None
) -> tuple[Array, Array]:
    """The weight of each input element of an axis, computed by torch itself: (goal, size).

    Also where an infinity becomes NaN, because torch multiplies by zero as well.
    """
    rows = torch.eye(size, dtype=dtypes.to_torch(x.dtype), device="cpu")
    weights: Array = _resized_rows(rows, mode, goal, align, scale).numpy().T
    infinite = torch.where(rows == 1, math.inf, 0.0).to(rows.dtype)
    lost: Array = _resized_rows(infinite, mode, goal, align, scale).isnan().numpy().T
    return weights, lost


def _resized_rows(rows: torch.Tensor, mode: str, goal: int, align: bool, scale: float | None) -> torch.Tensor:
    weights: torch.Tensor
    if mode == "linear":
        weights = aten.upsample_linear1d(rows[None], [goal], align, scale)[0]
    elif mode == "linear_aa":
        weights = aten._upsample_bilinear2d_aa(rows[None, :, None], [1, goal], align, None, scale)[0, :, 0]
    elif mode == "cubic_aa":
        weights = aten._upsample_bicubic2d_aa(rows[None, :, None], [1, goal], align, None, scale)[0, :, 0]
    else:
        # Four rows high, so that along the other axis too each neighbour is one of its own.
        high = torch.zeros(1, len(rows), 4, rows.shape[1], dtype=rows.dtype, device="cpu")
        high[0, :, 1] = rows
        weights = aten.upsample_bicubic2d(high, [4, goal], align, None, scale)[0, :, 1]
    return weights


def _places(exact: bool, size: int, goal: int, scale: float | None) -> Array:
    """Which input element torch takes for each output element of an axis."""
    layer = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
    places = layer(torch.arange(size, dtype=torch.float64, device="cpu")[None, None], [goal], scale)
    nearest: Array = places[0, 0].numpy().astype(np.int64)
    return nearest


def _taps(weights: Array, lost: Array) -> tuple[Array, Array]:
    """The elements to look up and their weights, (goal, taps), each row as long as the longest."""
    rows = [
        [
            *((int(place), float(weighs[place])) for place in np.flatnonzero(weighs)),
            *((int(place), 0.0) for place in np.flatnonzero(loses)),
        ]
        or [(0, 0.0)]
        for weighs, loses in zip(weights, lost, strict=True)
    ]
    taps = max(map(len, rows))
    for row in rows:
        while len(row) < taps:  # by halves, which add up to the same whatever the element is
            place, weight = row[0]
            row[0] = (place, weight / 2)
            row.append(row[0])
    pairs = np.array(rows)
    return pairs[..., 0].astype(np.int64), pairs[..., 1]


def _by_weights(x: Tensor, axis: int, weights: Array, lost: Array) -> Tensor:
    """A weighted sum of look-ups along one axis, of the elements that torch looks up."""
    goal, size = weights.shape
    if goal == size and np.array_equal(weights, np.eye(size)) and not lost.any():
        return x
    order, chosen = _taps(weights, lost)
    total: Tensor | None = None
    for tap in range(order.shape[1]):
        column = chosen[:, tap].reshape(-1, *[1] * (x.ndim - 1 - axis))
        term = F.mul(F.gather(x, order[:, tap], axis), F.constant(column.astype(dtypes.to_numpy(x.dtype))))
        total = term if total is None else F.add(total, term)
    assert total is not None
    return total


def _scales_match(x: Tensor, goal: Sequence[Any], scales: Sequence[float | None]) -> bool:
    return all(
        scale is not None
        and (not isinstance(n, int) or math.floor(np.float32(static(x, 2 + i)) * np.float32(scale)) == n)
        for i, (scale, n) in enumerate(zip(scales, goal, strict=True))
    )


def _layer(x: Tensor, goal: Sequence[Any], scales: Sequence[float | None], **attributes: Any) -> Tensor:
    """One Resize: by scales where they are given, which then also place the elements, else by sizes."""
    if all(scale is not None for scale in scales):
        factors = F.constant(np.array([1, 1, *scales], np.float32))
        return F.op("Resize", x, None, factors, **attributes)
    return F.op("Resize", x, None, None, F.size_vector([size(x, 0), size(x, 1), *goal]), **attributes)


def smooth(
    ctx: Context, self: Tensor, mode: str, output_size: Any, align: bool, scales: Sequence[float | None]
) -> Tensor:
    """Linear or cubic, with or without antialiasing."""
    if not is_float(self):
        raise ConversionError(f"resizing {self.dtype.name} by {mode} is not handled")
    rank = self.ndim - 2
    x, goal = wide(self, halves=True), _goal(self, output_size, scales)
    has_scale = [scale is not None for scale in scales]
    if align:
        scales = [None] * rank  # corners decide alone
    known = all(isinstance(n, int) for n in (*goal, *self.shape[2:]))
    plain = mode == "linear" or (mode == "cubic" and not known)
    if plain and rank == 2 and (None not in scales or not any(scales)):
        if not known and any(has_scale) and align:
            raise ConversionError("align_corners=True with scale factors needs sizes known at compile time")
        if not known or None in scales or _scales_match(x, goal, scales):
            where = "align_corners" if align else "half_pixel"
            result = _layer(
                x,
                goal,
                scales,
                mode=mode,
                coordinate_transformation_mode=where,
                cubic_coeff_a=-0.75 if mode == "cubic" else None,
            )
            return F.cast(result, self.dtype)
    for i in reversed(range(rank)):  # as torch does, so that what overflows on the way does in both
        if goal[i] is None:
            goal[i] = _scaled(self, 2 + i, scales[i])
        extent = self.shape[2 + i]
        if isinstance(goal[i], int) and isinstance(extent, int):
            x = _by_weights(x, 2 + i, *_weights(x, mode, extent, goal[i], align, scales[i]))
        elif mode == "linear":
            x = resized(x, 2 + i, goal[i], align, scales[i])
        else:
            raise ConversionError(f"resizing by {mode} to a size not known at compile time is not handled")
    return F.cast(x, self.dtype)


def nearest(
    ctx: Context, self: Tensor, exact: bool, output_size: Any, scales: Sequence[float | None]
) -> Tensor:
    rank = self.ndim - 2
    goal = _goal(self, output_size, scales)
    x = wide(self)
    factors = [_factor(self.shape[2 + i], goal[i], scales[i]) for i in range(rank)]
    if all(factors) and is_float(self):
        result = _layer(
            x,
            goal,
            factors,
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
        return F.cast(result, self.dtype)
    for i in range(rank):
        if goal[i] is None:
            goal[i] = _scaled(self, 2 + i, scales[i])
        extent = self.shape[2 + i]
        if isinstance(goal[i], int) and isinstance(extent, int):
            places: Any = _places(exact, extent, goal[i], scales[i])
        else:
            places = nearest_places(x, 2 + i, goal[i], exact, scales[i])
        x = F.gather(x, places, 2 + i)
    return F.cast(x, self.dtype)


def _factor(size: Any, goal: Any, scale: float | None) -> float | None:
    """How often each element is repeated, if that is an integer; only then do all engines round alike."""
    if scale is not None and (scale != int(scale) or scale < 1):
        return None
    if not isinstance(size, int) or not isinstance(goal, int):
        return scale
    repeated = goal // size
    return float(repeated) if repeated * size == goal and scale in (None, repeated) else None


def _listed(rank: int, factors: Any, each: Sequence[float | None]) -> list[float | None]:
    """The scales of all axes: listed in one argument, or given one by one, the last ones being used."""
    if factors is not None:
        return [float(scale) for scale in factors]
    return list(each[len(each) - rank :])


def _overloads(*names: str) -> list[Any]:
    return [overload for name in names for overload in (getattr(aten, name).vec, getattr(aten, name).default)]


# How torch's operators of every number of dimensions interpolate.
_MODES = {
    **{f"upsample_nearest{rank}d": "nearest" for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": "nearest_exact" for rank in (1, 2, 3)},
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear",
    "upsample_bicubic2d": "cubic",
    "_upsample_bilinear2d_aa": "linear_aa",
    "_upsample_bicubic2d_aa": "cubic_aa",
}


@converter(*_overloads(*_MODES))
def upsample(
    ctx: Context,
    output_size: Any,
    align_corners: bool = False,
    self: Tensor | None = None,
    input: Tensor | None = None,
    scale_factors: Any = None,
    scales: float | None = None,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    x = input if self is None else self
    assert x is not None
    rank, mode = x.ndim - 2, _MODES[ctx.operator]
    each = [scales] if rank == 1 else [scales_d, scales_h, scales_w]
    factors = _listed(rank, scale_factors, each)
    if mode.startswith("nearest"):
        return nearest(ctx, x, mode == "nearest_exact", output_size, factors)
    return smooth(ctx, x, mode, output_size, align_corners, factors)


_GRID_MODES = ("linear", "nearest", "cubic")
_GRID_PADDING = ("zeros", "border", "reflection")


@converter(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: Context, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    mode = _GRID_MODES[interpolation_mode]
    if input.ndim == 5 and mode == "cubic":
        raise ConversionError("interpolation_mode=2 (cubic) over volumes is not handled")
    if mode == "nearest" and grid.dtype in HALVES:
        # torch rounds places in halves, and then takes another pixel.
        raise ConversionError(f"interpolation_mode=1 (nearest) by a grid of {grid.dtype.name} is not handled")
    result = F.grid_sample(
        wide(input, halves=True),
        wide(grid, halves=True),
        mode=mode,
        padding_mode=_GRID_PADDING[padding_mode],
        align_corners=align_corners,
    )
    return F.cast(result, input.dtype)
