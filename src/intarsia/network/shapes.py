"""Arithmetic on shapes whose sizes may be symbols or unknown."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.errors import NetworkError
from intarsia.network.types import Dim, Shape


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an elementwise operation over these shapes.

    >>> broadcast((2, 1, "n"), (3, 1))
    (2, 3, 'n')
    """
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


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes, where all are known, one is 0, or only one is not 1.

    >>> product((2, 3)), product((1, "n")), product((2, "n"))
    (6, 'n', None)
    """
    if 0 in dims:
        return 0
    rest = [dim for dim in dims if dim != 1]
    if len(rest) == 1:
        return rest[0]
    total = 1
    for dim in rest:
        if not isinstance(dim, int):
            return None
        total *= dim
    return total
