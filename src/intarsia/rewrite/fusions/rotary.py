"""Rotary embedding from its fragments."""

from __future__ import annotations

from typing import Any

import numpy as np

from intarsia.network import Layer, Network, Tensor
from intarsia.network import functional as F
from intarsia.rewrite.fusions.fusion import Fusion, given, integers
from intarsia.rewrite.pattern import refuse, rule
from intarsia.rewrite.term import see_through

_END = 1 << 31  # the end of a slice, larger than any size


def _rotated(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    upper, lower = (op.Slice(x, _any_inputs=True, _name=name) for name in ("upper", "lower"))
    return op.Add(op.Mul(x, cos), op.Mul(op.Concat(op.Neg(upper), lower, axis=-1), sin))


@rule(_rotated)
def rotary_embedding(net: Network, x: Tensor, cos: Tensor, sin: Tensor, upper: Layer, lower: Layer) -> object:
    """x * cos + concat(-x[half:], x[:half]) * sin, where both halves of cos and sin are equal."""
    if x.ndim != 4 or not all(isinstance(d, int) for d in (x.shape[1], x.shape[3])):
        return refuse(f"{list(x.shape)} is not batch, heads, length, width")
    width = int(x.shape[3])  # type: ignore[arg-type]
    half = width // 2
    if width % 2:
        return refuse(f"the width {width} is odd")
    if not (_cuts(upper, half, width) and _cuts(lower, 0, half)):
        return refuse("the slices are not the two halves")
    caches = []
    for tensor in (cos, sin):
        if tensor.ndim != 4 or tensor.shape[1] != 1 or tensor.shape[3] != width:
            return refuse(f"{tensor.name} is {list(tensor.shape)}, not one angle a position")
        if tensor.shape[0] not in (1, x.shape[0]) or tensor.shape[2] != x.shape[2] or None in tensor.shape:
            return refuse(f"{tensor.name} is {list(tensor.shape)}, {x.name} {list(x.shape)}")
        if tensor.shape[0] != x.shape[0] and not isinstance(x.shape[0], int):
            return refuse(f"{tensor.name} has one row for a batch of {x.shape[0]}")
        if not _repeats(tensor):
            return refuse(f"{tensor.name} may have two different halves")
        caches.append(tensor)
    flat = [F.slice(F.squeeze(t, [1]), 0, half, axis=2) for t in caches]
    if cos.shape[0] != x.shape[0] or sin.shape[0] != x.shape[0]:  # every item of a batch needs its own
        flat = [F.expand(t, (int(x.shape[0]), 1, 1)) for t in flat]  # type: ignore[arg-type]
    return F.op("RotaryEmbedding", x, *flat)


def _cuts(part: Layer, low: int, high: int) -> bool:
    """Whether a slice is from `low` to `high` of the last of four dimensions, in steps of 1."""
    numbers = [integers(tensor) for tensor in part.get_inputs()[1:]]
    if len(numbers) != 4 or any(number is None or len(number) != 1 for number in numbers):
        return False
    start, end, axis, step = (number[0] for number in numbers if number is not None)
    width = 2 * max(low, high - low) if low else 2 * high
    stop = min(end + width if end < 0 else end, width)
    first = start + width if start < 0 else start
    return (first, stop) == (low, high) and axis in (3, -1) and step == 1


def _repeats(tensor: Tensor) -> bool:
    """Whether the second half of the last dimension equals the first: Cos or Sin of a Concat(f, f)."""
    if tensor.constant is not None:
        left, right = np.split(tensor.constant, 2, axis=-1)
        return bool(np.array_equal(left, right))
    value = see_through(tensor.value)
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Concat":
            axis = node.attributes["axis"].value
            rank = len(value.shape or ())
            return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and axis in (-1, rank - 1)
        if node.op_type == "Unsqueeze":
            axes = integers(Layer(node).get_inputs(1)[0])
            rank = len(value.shape or ())
            if axes is None or any(a % rank == rank - 1 for a in axes):
                return False
        elif node.op_type == "Mul":
            other = node.inputs[1]
            if other is None or other.const_value is None or other.const_value.size != 1:
                return False
        elif node.op_type not in ("Cos", "Sin", "Cast"):
            return False
        value = see_through(node.inputs[0])
    return False


def _written(rng: np.random.Generator, large: bool) -> None:
    batch, heads, length, width = (1, 16, 128, 64) if large else (2, 3, 4, 6)
    own = batch if rng.integers(2) or large else 1
    x, angles = given("x", batch, heads, length, width), given("angles", own, length, width // 2)
    both = F.concat([angles, angles], axis=-1)
    cos, sin = F.unsqueeze(F.cos(both), [1]), F.unsqueeze(F.sin(both), [1])
    half = width // 2
    turned = F.concat([F.neg(F.slice(x, half, _END, axis=3)), F.slice(x, 0, half, axis=3)], axis=3)
    (x * cos + turned * sin).mark_output("y")


FUSIONS = (Fusion("rotary_embedding", rotary_embedding, _written, 60),)
