"""Intervals of what is moved, picked, counted or made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from intarsia.engines.guards.intervals.interval import (
    LONGEST,
    MOST_ELEMENTS,
    Given,
    Interval,
    add,
    count,
    hull,
    longest,
    ranges_of,
    times,
    whole,
)
from intarsia.network.network import Layer

ZERO = Interval(0, 0)


def _first(given: Given) -> Interval:
    assert given[0] is not None
    return given[0]


@ranges_of(
    "Compress",
    "DepthToSpace",
    "Dropout",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "GlobalMaxPool",
    "Identity",
    "ReduceMax",
    "ReduceMin",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
def _same(layer: Layer, given: Given) -> Interval:
    return _first(given)


@ranges_of("Split")
def _split(layer: Layer, given: Given) -> Sequence[Interval]:
    return [_first(given)] * len(layer.get_outputs())


@ranges_of("Concat")
def _concat(layer: Layer, given: Given) -> Interval:
    return hull(*[interval for interval in given if interval is not None])


@ranges_of("Trilu")
def _trilu(layer: Layer, given: Given) -> Interval:
    return hull(_first(given), ZERO)


@ranges_of("Pad")
def _pad(layer: Layer, given: Given) -> Interval:
    value = given[2] if len(given) > 2 else None
    return hull(_first(given), value or ZERO)


@ranges_of("MaxPool")
def _max_pool(layer: Layer, given: Given) -> Sequence[Interval]:
    return [_first(given), Interval(0, _elements(layer))]


@ranges_of("Unique")
def _unique(layer: Layer, given: Given) -> Sequence[Interval]:
    return [_first(given), *[Interval(0, _elements(layer))] * 3]


def _elements(layer: Layer) -> int:
    x = layer.get_inputs(0)[0]
    assert x is not None
    return min(count(x, range(x.ndim)), LONGEST)


@ranges_of("ScatterElements", "ScatterND")
def _scatter(layer: Layer, given: Given) -> Interval:
    x, _, updates = given
    assert x is not None and updates is not None
    way = layer.attribute("reduction", "none")
    if way in ("none", "max", "min"):
        return hull(x, updates)
    if way == "add":
        source = layer.get_inputs(2)[0]
        assert source is not None
        return add(x, times(count(source, range(source.ndim)), updates))
    return whole(layer.get_outputs(0)[0].dtype)


@ranges_of("Shape")
def _shape(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    start, end = layer.attribute("start", 0), layer.attribute("end", None)
    sizes = list(x.shape)[start:end]
    if not sizes:
        return ZERO
    known = [size for size in sizes if isinstance(size, int)]
    open_ended = len(known) < len(sizes)
    return Interval(0 if open_ended else min(known), LONGEST if open_ended else max(known))


@ranges_of("Size")
def _size(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    total = count(x, range(x.ndim))
    return Interval(0, LONGEST) if total == MOST_ELEMENTS else Interval(total, total)


@ranges_of("Range")
def _range(layer: Layer, given: Given) -> Interval:
    start, limit, step = given
    assert start is not None and limit is not None and step is not None
    if step.low > 0:
        return Interval(start.low, max(start.low, limit.high), start.nan or limit.nan)
    return hull(start, limit)


@ranges_of("ConstantOfShape")
def _filled(layer: Layer, given: Given) -> Interval:
    value: Any = layer.attribute("value")
    if value is None:
        return ZERO
    array = np.ravel(value.numpy() if hasattr(value, "numpy") else value)
    item = array[0].item() if array.dtype.kind in "iub" else float(array[0])
    return Interval(item, item) if item == item else whole(layer.get_outputs(0)[0].dtype)


@ranges_of("NonZero")
def _nonzero(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    return Interval(0, max([longest(x, axis) - 1 for axis in range(x.ndim)], default=0))


@ranges_of("ArgMax", "ArgMin")
def _argument(layer: Layer, given: Given) -> Interval:
    x = layer.get_inputs(0)[0]
    assert x is not None
    return Interval(0, max(longest(x, layer.attribute("axis", 0)) - 1, 0)) if x.ndim else ZERO


@ranges_of("TopK")
def _topk(layer: Layer, given: Given) -> Sequence[Interval]:
    x = layer.get_inputs(0)[0]
    assert x is not None
    last = max(longest(x, layer.attribute("axis", -1)) - 1, 0) if x.ndim else 0
    return [_first(given), Interval(0, last)]


@ranges_of("OneHot")
def _one_hot(layer: Layer, given: Given) -> Interval:
    assert given[2] is not None
    return given[2]


@ranges_of("EyeLike")
def _eye(layer: Layer, given: Given) -> Interval:
    return Interval(0, 1)
