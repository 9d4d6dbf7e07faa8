"""Shape rule of Resize: by sizes or scales, along some axes, keeping the aspect ratio or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import NetworkError
from intarsia.network.infer import shapes
from intarsia.network.infer.registry import Made, first, infers, known_ints, optional
from intarsia.network.types import Dim
from intarsia.network.value import TypedValue


@infers("Resize")
def _resize(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Made:
    x, scales, sizes = first(inputs), optional(inputs, 2), optional(inputs, 3)
    axes = shapes.axes_of(list(attributes.get("axes") or range(x.ndim)), x.ndim)
    old, dims = [x.shape[axis] for axis in axes], list(x.shape)
    wanted, factors = known_ints(sizes), None if scales is None else scales.constant
    new: list[Dim] = [None] * len(axes)
    if wanted is not None:
        _count(wanted, axes)
        new = _by_sizes(old, wanted, str(attributes.get("keep_aspect_ratio_policy", "stretch")))
    elif factors is not None and factors.size:
        _count(factors, axes)
        new = [int(d * float(s)) if isinstance(d, int) else None for d, s in zip(old, factors, strict=True)]
    for axis, size in zip(axes, new, strict=True):
        dims[axis] = size
    return [(x.dtype, tuple(dims))]


def _count(numbers: Any, axes: Sequence[int]) -> None:
    if len(numbers) != len(axes):
        raise NetworkError(f"Resize of {len(axes)} dimensions by {len(numbers)} numbers")


def _by_sizes(old: Sequence[Dim], wanted: Sequence[int], policy: str) -> list[Dim]:
    if policy == "stretch":
        return list(wanted)
    if not all(isinstance(d, int) and d for d in old):
        return [None] * len(old)
    pick = min if policy == "not_larger" else max
    scale = pick(size / int(d) for size, d in zip(wanted, old, strict=True))  # type: ignore[arg-type]
    return [math.floor(scale * int(d) + 0.5) for d in old]  # type: ignore[arg-type]
