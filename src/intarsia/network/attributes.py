"""Layer attributes: Python values to `onnx_ir.Attr` and back."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import convenience

from intarsia.errors import NetworkError


def to_attr(name: str, value: Any) -> ir.Attr:
    """An attribute that holds `value`; booleans become 0 or 1, as ONNX has none."""
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
    """The Python value an attribute holds."""
    value = attr.value
    return list(value) if isinstance(value, tuple) else value
