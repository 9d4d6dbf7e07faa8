"""Values: name, dtype, shape, and content if constant; arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import helper

from intarsia.errors import NetworkError
from intarsia.network.text import type_text


class TypedValue:
    """A read-only view of an `onnx_ir.Value` for shape rules and checks."""

    __slots__ = ("value",)

    def __init__(self, value: ir.Value) -> None:
        self.value: ir.Value = value

    # A view has no identity of its own: two views of one value are equal.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypedValue) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {type_text(self.value)})"

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def dtype(self) -> ir.DataType:
        dtype = self.value.dtype
        if dtype is None:
            raise NetworkError(f"tensor {self.name} has no dtype")
        return dtype

    @property
    def shape(self) -> Shape:
        shape = self.value.shape
        dims = known_dims.get(id(shape))
        if dims is not None:
            return dims
        if shape is None:
            raise NetworkError(f"tensor {self.name} has no shape")
        return tuple(d if isinstance(d, int) else d.value for d in shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def constant(self) -> np.ndarray[Any, Any] | None:
        """The content, if it is constant."""
        content = self.value.const_value
        return None if content is None else content.numpy()


# Sizes and shapes of values; some sizes are symbols or unknown.

Dim = int | str | None  # a size, a symbol such as "s0" or "2*s0", or unknown
Shape = tuple[Dim, ...]
OPSET = 23
MICROSOFT = "com.microsoft"

# Equal shapes share one frozen object, whose dimensions are looked up by its identity.
_shapes: dict[Shape, ir.Shape] = {}
known_dims: dict[int, Shape] = {}


def raw_shape(dims: Shape) -> ir.Shape:
    """The shared, frozen `onnx_ir` shape with these sizes."""
    shape = _shapes.get(dims)
    if shape is None:
        dims = tuple(dim if dim is None or isinstance(dim, str) else int(dim) for dim in dims)
        shape = _shapes[dims] = ir.Shape(dims, frozen=True)
        known_dims[id(shape)] = dims
    return shape


def ir_version(graph: ir.Graph) -> int:
    """The lowest version of ONNX's file format for the opsets of a graph."""
    opsets = [helper.make_opsetid(domain, number) for domain, number in graph.opset_imports.items()]
    return int(helper.find_min_ir_version_for(opsets, ignore_unknown=True))


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
            result = dim  # the symbol can only be 1 or equal to this size
        elif not isinstance(result, int):
            result = None
    return result


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes: if all are integers, one is 0, or only one is not 1.

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
