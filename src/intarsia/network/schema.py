"""What ONNX says of an operator: how many inputs and of which dtypes, which attributes by default."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx import defs, helper

from intarsia.network.shapes import OPSET
from intarsia.network.value import TypedValue

_DTYPES = {f"tensor({dtype.name.lower()})": dtype for dtype in ir.DataType}


class Formal(NamedTuple):
    """One input as the operator defines it; inputs of one `variable` have one dtype."""

    name: str
    variable: str | None
    dtypes: frozenset[ir.DataType]


@dataclass(frozen=True)
class Schema:
    """The part of an operator's definition that networks and patterns ask for."""

    min_inputs: int
    max_inputs: int
    defaults: dict[str, Any]
    inputs: tuple[Formal, ...]  # the last stands for all that follow

    def misfit(self, op_type: str, inputs: Sequence[TypedValue | None]) -> str | None:
        """Why the operator cannot have these inputs; None if it can."""
        if not self.min_inputs <= len(inputs) <= self.max_inputs:
            return f"has {len(inputs)} inputs; {op_type} takes {self.min_inputs} to {self.max_inputs}"
        last = len(self.inputs) - 1
        bound: dict[str, TypedValue] = {}
        for place, tensor in enumerate(inputs):
            if tensor is None:
                continue
            name, variable, dtypes = self.inputs[min(place, last)]
            if tensor.dtype not in dtypes:
                return f"reads {tensor!r} as {name}, which {op_type} does not take as {tensor.dtype.name}"
            if variable is not None:
                other = bound.setdefault(variable, tensor)
                if other.dtype != tensor.dtype:
                    return f"reads {other!r} and {tensor!r}, which {op_type} takes as one dtype"
        return None


@functools.cache
def schema_of(domain: str, op_type: str) -> Schema | None:
    """The schema at this package's opset; None for operators that ONNX does not define."""
    if domain:
        return None
    if not defs.has(op_type, ""):
        return None
    try:
        schema = defs.get_schema(op_type, OPSET, "")
    except defs.SchemaError:
        return None  # newer than our opset: the layer carries its own version
    defaults = {
        name: helper.get_attribute_value(attr.default_value)
        for name, attr in schema.attributes.items()
        if attr.default_value.type
    }
    plain = {name: v.decode() if isinstance(v, bytes) else v for name, v in defaults.items()}
    return Schema(
        schema.min_input,
        schema.max_input,
        plain,
        tuple(_formal(one, schema) for one in schema.inputs),
    )


def _formal(one: defs.OpSchema.FormalParameter, of: defs.OpSchema) -> Formal:
    allowed = {each.type_param_str: each.allowed_type_strs for each in of.type_constraints}
    names = allowed.get(one.type_str, [one.type_str])
    free = one.option == defs.OpSchema.FormalParameterOption.Variadic and not one.is_homogeneous
    dtypes = frozenset(_DTYPES[name] for name in names if name in _DTYPES)
    return Formal(one.name, None if free else one.type_str, dtypes)
