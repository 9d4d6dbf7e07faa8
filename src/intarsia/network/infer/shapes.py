"""Arithmetic on shapes whose sizes may be symbols or unknown."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.errors import NetworkError
from intarsia.network.types import Dim, Shape
from intarsia.network.value import TypedValue


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


def require_fits(shape: Shape, into: Shape, what: str) -> None:
    """Refuse a shape that does not broadcast into another one, whose sizes stay as they are."""
    for dim, wanted in zip(reversed(shape), reversed(into), strict=False):
        if isinstance(dim, int) and isinstance(wanted, int) and dim not in (1, wanted):
            raise NetworkError(f"{what}, {list(shape)}, does not broadcast to {list(into)}")
    if len(shape) > len(into):
        raise NetworkError(f"{what}, {list(shape)}, does not broadcast to {list(into)}")


def axis_of(axis: int, rank: int) -> int:
    """A negative axis counted from the front."""
    if not -rank <= axis < rank:
        raise NetworkError(f"axis {axis} is outside a tensor of {rank} dimensions")
    return axis + rank if axis < 0 else axis


def axes_of(axes: Sequence[int], rank: int) -> list[int]:
    """Several axes, each named once."""
    found = [axis_of(axis, rank) for axis in axes]
    if len(set(found)) != len(found):
        raise NetworkError(f"axes {list(axes)} name one dimension twice")
    return found


def require_rank(tensor: TypedValue, what: str, least: int, most: int | None = None) -> None:
    """Refuse a tensor of too few or too many dimensions; `most` is `least` unless given."""
    most = least if most is None else most
    if not least <= tensor.ndim <= most:
        wanted = str(least) if least == most else f"{least} or more" if most >= 99 else f"{least} to {most}"
        raise NetworkError(f"{what} has {tensor.ndim} dimensions and needs {wanted}")


def same(a: Dim, b: Dim, what: str) -> Dim:
    """What is known of two sizes that must be one: a size before a symbol before nothing."""
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise NetworkError(f"{what}: {a} against {b}")
    if isinstance(a, int) or b is None:
        return a
    return b if isinstance(b, int) or a is None else a


def add(dims: Sequence[Dim]) -> Dim:
    """The sum of sizes, where all are known or only one is not zero."""
    rest = [dim for dim in dims if dim != 0]
    if len(rest) == 1:
        return rest[0]
    return sum(rest) if all(isinstance(d, int) for d in rest) else None  # type: ignore[arg-type]


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes, where all are known, one is 0, or only one is not 1."""
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


def quotient(dim: Dim, by: int, what: str) -> Dim:
    """A size cut into parts; refused where it is known not to come out even."""
    if by == 1 or not isinstance(dim, int):
        return dim if by == 1 else None
    if dim % by:
        raise NetworkError(f"{what} {dim} is not a multiple of {by}")
    return dim // by
