"""Layer attributes: Python values to `onnx_ir.Attr` and back.

ONNX stores floats of attributes in 32 bits. Patterns refuse to put a float64 number into one. Leaving such
layers to PyTorch instead would cut a float64 model at every norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intarsia.errors import NetworkError


def to_attr(name: str, value: Any) -> ir.Attr:
    """An attribute with this value; booleans become 0 or 1, since ONNX has none."""
    if isinstance(value, list | tuple):
        kind = ir.AttributeType.FLOATS if any(isinstance(item, float) for item in value) else None
        value = [_plain(item) for item in value]
        kind = kind or (None if value else ir.AttributeType.INTS)
    else:
        kind, value = None, _plain(value)
    try:
        return convenience.convert_attribute(name, value, kind)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"attribute {name}={value!r} has a type that no layer can hold") from error


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) else value  # booleans and dtypes are integers too


def from_attr(attr: ir.Attr) -> Any:
    """The Python value of an attribute."""
    value = attr.value
    return list(value) if isinstance(value, tuple) else value


def is_rounded(number: float, dtype: ir.DataType | None) -> bool:
    """Whether an attribute, which ONNX stores in 32 bits, is less precise than the number in this dtype.

    >>> is_rounded(0.1, ir.DataType.DOUBLE), is_rounded(0.5, ir.DataType.DOUBLE)
    (True, False)
    """
    return dtype == ir.DataType.DOUBLE and float(np.float32(number)) != number


def rounded_attribute(node: ir.Node) -> str | None:
    """The attribute that rounds a number of a float64 layer, as text; None if there is none."""
    if not any(value.dtype == ir.DataType.DOUBLE for value in node.outputs):
        return None
    if node.op_type == "Gelu" and "approximate" in node.attributes:
        return "constants of 32 bits in its definition"
    for name, attr in node.attributes.items():
        numbers = {ir.AttributeType.FLOAT: [attr.value], ir.AttributeType.FLOATS: attr.value}.get(
            attr.type, ()
        )
        if any(is_rounded(number, ir.DataType.DOUBLE) for number in numbers):
            return f"{name}={attr.value} in 32 bits"
    return None
