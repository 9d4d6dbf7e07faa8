"""Arithmetic on shapes whose sizes may be symbols or unknown."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.errors import NetworkError
from intarsia.network.types import Dim, Shape


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an elementwise operation over these shapes."""
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_broadcast_dim(dims) for dims in zip(*padded, strict=True))


def _broadcast_dim(dims: tuple[Dim, ...]) -> Dim:
    result: Dim = 1
    for dim in dims:
        if dim == 1 or (dim == result and dim is not None):
            continue
        if result == 1:
            result = dim
        elif isinstance(dim, int) and isinstance(result, int):
            raise NetworkError(f"sizes {result} and {dim} do not broadcast")
        elif isinstance(dim, int):
            result = dim  # the symbol can only be 1 or this size
        elif not isinstance(result, int):
            result = None
    return result


def axis_of(axis: int, rank: int) -> int:
    """A negative axis counted from the front."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise NetworkError(f"axis {axis} is outside a tensor of {rank} dimensions")
    return axis + rank if axis < 0 else axis


def add(dims: Sequence[Dim]) -> Dim:
    """The sum of sizes, where all are known."""
    return sum(dims) if all(isinstance(d, int) for d in dims) else None  # type: ignore[arg-type]


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes, where all are known."""
    total = 1
    for dim in dims:
        if not isinstance(dim, int):
            return 0 if 0 in dims else None
        total *= dim
    return total
