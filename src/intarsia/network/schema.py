"""What ONNX says of an operator: how many inputs and outputs, which attributes by default."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from onnx import defs, helper

from intarsia.network.network import OPSET


@dataclass(frozen=True)
class Schema:
    """The part of an operator's definition that networks and patterns ask for."""

    min_inputs: int
    max_inputs: int
    max_outputs: int
    defaults: dict[str, Any]
    has_attributes: bool


@functools.cache
def schema_of(domain: str, op_type: str) -> Schema | None:
    """The schema at this package's opset; None for operators that ONNX does not define."""
    if domain:
        return None
    if not defs.has(op_type, ""):
        return None
    try:
        found = defs.get_schema(op_type, OPSET, "")
    except defs.SchemaError:
        return None  # newer than our opset: the layer carries its own version
    defaults = {
        name: helper.get_attribute_value(attr.default_value)
        for name, attr in found.attributes.items()
        if attr.default_value.type
    }
    plain = {name: v.decode() if isinstance(v, bytes) else v for name, v in defaults.items()}
    return Schema(found.min_input, found.max_input, found.max_output, plain, bool(found.attributes))
