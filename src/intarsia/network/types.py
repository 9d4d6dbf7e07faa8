"""Sizes and shapes as networks speak of them, and the domains and opset they are written in."""

from __future__ import annotations

import onnx_ir as ir
from onnx import helper

Dim = int | str | None  # a size, a symbol such as "s0" or "2*s0", or unknown
Shape = tuple[Dim, ...]
OPSET = 23
MICROSOFT = "com.microsoft"

# Equal shapes are one frozen object; its dimensions as plain values are found by identity.
_shapes: dict[Shape, ir.Shape] = {}
known_dims: dict[int, Shape] = {}


def raw_shape(dims: Shape) -> ir.Shape:
    """The shared, frozen `onnx_ir` shape of these sizes."""
    shape = _shapes.get(dims)
    if shape is None:
        dims = tuple(dim if dim is None or isinstance(dim, str) else int(dim) for dim in dims)
        shape = _shapes[dims] = ir.Shape(dims, frozen=True)
        known_dims[id(shape)] = dims
    return shape


def ir_version(graph: ir.Graph) -> int:
    """The least version of ONNX's file format that knows the opsets a graph uses."""
    opsets = [helper.make_opsetid(domain, number) for domain, number in graph.opset_imports.items()]
    return int(helper.find_min_ir_version_for(opsets, ignore_unknown=True))
