"""Layer attributes: Python values to `onnx_ir.Attr` and back."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intarsia.errors import NetworkError


def to_attr(name: str, value: Any) -> ir.Attr:
    """An attribute that holds `value`; booleans become 0 or 1, as ONNX has none."""
    if isinstance(value, ir.DataType):
        return ir.AttrInt64(name, int(value))
    if isinstance(value, bool | int):
        return ir.AttrInt64(name, int(value))
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if isinstance(value, ir.Graph):
        return ir.AttrGraph(name, value)
    if isinstance(value, ir.TensorProtocol):
        return ir.AttrTensor(name, value)
    if isinstance(value, list | tuple):
        if all(isinstance(item, int) for item in value):
            return ir.AttrInt64s(name, [int(item) for item in value])
        if all(isinstance(item, int | float) for item in value):
            return ir.AttrFloat32s(name, [float(item) for item in value])
        if all(isinstance(item, str) for item in value):
            return ir.AttrStrings(name, list(value))
    raise NetworkError(f"attribute {name}={value!r} has a type that no layer can hold")


def from_attr(attr: ir.Attr) -> Any:
    """The Python value an attribute holds."""
    value = attr.value
    return list(value) if isinstance(value, tuple) else value
